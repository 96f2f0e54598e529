"""Running a profile in this process: the same prompt at every budget, in turn."""

import pydoc_data.topics
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bpkv_trt.errors import InputError
from bpkv_trt.latency.profile import Profile
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.models.placement import device_of, dtype_of
from bpkv_trt.profiling import Trace
from bpkv_trt.progress import Progress
from bpkv_trt.request import read_prompt
from bpkv_trt.runtime.fitted_engine import fitted_engine
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams

Row = dict[str, Any]


def run_session(profile: Profile, progress: Progress) -> tuple[list[Row], Trace]:
    """Run a profile; returns a row per counted run, and the trace of them all.

    Raises a BpkvError before anything is run where model, prompt, options and memory do not go together.
    """
    device = device_of(profile.device)
    progress.stage("load")
    loaded = load_model(profile.model, dtype=dtype_of(profile.dtype, device), device=device)
    prompt = _prompt(loaded, profile)
    synchronize = torch.cuda.synchronize if device == "cuda" else None
    progress.stage("warm-up", profile.warmup * len(profile.budgets))
    for _ in range(profile.warmup):
        for budget in profile.budgets:
            _run(loaded, profile, budget, prompt, Trace(synchronize))
            progress.advance()
    trace, rows = Trace(synchronize, record=True), list[Row]()
    progress.stage("runs", profile.repeats * len(profile.budgets))
    with _captured(profile):
        for repeat in range(profile.repeats):
            for budget in profile.budgets:  # in turn, so that a machine that slows down does so for all of them
                rows.append({"budget": budget, "repeat": repeat, **_run(loaded, profile, budget, prompt, trace)})
                progress.advance()
    return rows, trace


def _prompt(loaded: LoadedModel, profile: Profile) -> list[int]:
    if profile.prompt_tokens + profile.answer_tokens > loaded.traits.max_positions:
        raise InputError(
            f"The profile has {profile.prompt_tokens} tokens of prompt and {profile.answer_tokens} of answer, and "
            f"{profile.model} knows {loaded.traits.max_positions} positions; give fewer."
        )
    if profile.prompt_file is None:
        text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    else:
        text = read_prompt(profile.prompt_file, flag="prompt_file")
    length, tokens = 2 * profile.prompt_tokens, list[int]()
    while len(tokens) < profile.prompt_tokens and length < 2 * len(text):  # of a long text no more than is of use
        (tokens,) = loaded.encoder.encode(text[:length], raw=True)
        length *= 2
    if len(tokens) < profile.prompt_tokens:
        raise InputError(
            f"The prompt has {len(tokens)} tokens for this model, and prompt_tokens is {profile.prompt_tokens}; give "
            "fewer, or a longer text as prompt_file."
        )
    return tokens[: profile.prompt_tokens]


def _run(loaded: LoadedModel, profile: Profile, budget: str, prompt: list[int], trace: Trace) -> Row:
    before, first_event, first_sample = trace.seconds(), len(trace.events), len(trace.memory)
    engine = fitted_engine(loaded, profile.config(budget), [len(prompt)], profile.answer_tokens, trace)
    generator = Generator(engine)
    request = generator.add([prompt], SamplingParams(profile.answer_tokens))
    drawn, begun = list[float](), time.perf_counter()
    generator.generate([request], lambda _: drawn.append(time.perf_counter() - begun))
    trace.cache_bytes = None  # which would keep this pool while the next one is made
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


@contextmanager
def _captured(profile: Profile) -> Iterator[None]:
    """What a profiler that waits for CUDA's profiling interface records."""
    if profile.nsys.capture_range != "cudaProfilerApi" or not torch.cuda.is_available():
        yield
        return
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
