"""One answer to the prompt of a profile, on an engine of its own."""

import statistics
import time
from typing import Any

from bpkv_trt.latency.profile import Profile
from bpkv_trt.latency.prompt_text import prompts
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.fitted_engine import fitted_engine
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams


class AnswerRun:
    """The same prompt at any of the budgets."""

    def __init__(self, loaded: LoadedModel, profile: Profile) -> None:
        """Raises InputError where model, prompt and answer do not go together."""
        self._loaded, self._profile = loaded, profile
        (text,) = prompts(loaded, profile, [profile.prompt_tokens])
        (self._prompt,) = loaded.encoder.encode(text, raw=True)

    def warm_up(self, budget: str, trace: Trace) -> None:
        """A run that is not looked at."""
        self(budget, trace)

    def __call__(self, budget: str, trace: Trace) -> dict[str, Any]:
        """The row of a run, in entries, bytes and seconds. Raises InputError where the memory is too small."""
        before, first_event, first_sample = trace.seconds(), len(trace.events), len(trace.memory)
        prompt, answer = self._prompt, self._profile.answer_tokens
        engine = fitted_engine(self._loaded, self._profile.config(budget), [len(prompt)], answer, trace)
        generator = Generator(engine)
        request = generator.add([prompt], SamplingParams(answer))
        drawn, begun = list[float](), time.perf_counter()
        generator.generate([request], lambda _: drawn.append(time.perf_counter() - begun))
        trace.weigh()
        event = request.events[0]
        steps = [(each.end_ns - each.start_ns) / 1e9 for each in trace.events[first_event:] if each.name == "decode"]
        return {
            "prompt_tokens": len(prompt),
            "answer_tokens": len(request.generated),
            "entries_before": event.entries_before,
            "entries_after": event.entries_after,
            "bytes_before": event.bytes_before,
            "bytes_after": event.bytes_after,
            "bytes_peak": max((sample.size for sample in trace.memory[first_sample:]), default=0),
            "first_token_s": drawn[0],
            "answer_s": drawn[-1],
            "decode_step_s": statistics.median(steps) if steps else None,
            "seconds": {name: after - before[name] for name, after in trace.seconds().items()},
            "note": event.note,
        }
