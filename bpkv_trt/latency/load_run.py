"""The requests of a profile of serving, asked of the loop that a server runs."""

import random
import time
from collections import defaultdict
from queue import SimpleQueue
from typing import Any

import numpy as np

from bpkv_trt.core.budget import parse_bytes
from bpkv_trt.errors import BpkvError
from bpkv_trt.latency.profile import Profile, ServingLoad
from bpkv_trt.latency.prompt_text import prompts
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.policies.registry import settled
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.memory import activation_bytes, pool_bytes, require_memory
from bpkv_trt.runtime.scratch import scratch_rows
from bpkv_trt.runtime.serving_batch import ServingBatch
from bpkv_trt.runtime.serving_loop import ServingLoop
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import ServingOutput, ServingRequest


class LoadRun:
    """The same requests at any of the budgets, over a pool of the same bytes."""

    def __init__(self, loaded: LoadedModel, profile: Profile, load: ServingLoad) -> None:
        """Raises a BpkvError where some request could not be served at some budget, before any is."""
        self._loaded, self._profile, self._load = loaded, profile, load
        self._requests = [self._request(text) for text in prompts(loaded, profile, _lengths(profile, load))]
        self._pool_bytes = self._bytes_of_pool()
        for budget in profile.budgets:
            self._require_memory(budget)
            loop = self._loop(budget, Trace(), ServingMetrics())
            try:
                for request in self._requests:
                    loop.check(request)
            finally:
                loop.shutdown(timeout_s=0)

    def warm_up(self, budget: str, trace: Trace) -> None:
        """The first request alone."""
        self._serve(budget, trace, self._requests[:1], _Seen())

    def __call__(self, budget: str, trace: Trace) -> dict[str, Any]:
        """The row of a run, in entries, bytes and seconds. Raises a BpkvError where a request does not end well."""
        before, first_sample, seen = trace.seconds(), len(trace.memory), _Seen()
        seconds, ends = self._serve(budget, trace, self._requests, seen)
        tokens = sum(end.tokens for end in ends)
        return {
            "requests": len(ends),
            "prompt_tokens": sum(end.prompt_tokens for end in ends),
            "answer_tokens": tokens,
            "entries_before": sum(end.entries_total for end in ends),
            "entries_after": sum(end.entries_kept for end in ends),
            "bytes_pool": self._pool_bytes,
            "bytes_peak": max((sample.size for sample in trace.memory[first_sample:]), default=0),
            "most_running": seen.most_running,
            "load_s": seconds,
            "tokens_per_s": tokens / seconds,
            "first_token_s": seen.observed["bpkv_time_to_first_token_seconds"],
            "token_s": seen.observed["bpkv_time_per_output_token_seconds"],
            "seconds": {name: after - before[name] for name, after in trace.seconds().items()},
        }

    def _request(self, text: str) -> ServingRequest:
        return ServingRequest(text, raw=True, max_tokens=self._profile.answer_tokens, ignore_eos=True)

    def _bytes_of_pool(self) -> int:
        """As many at every budget: room for whole caches, and for what the compaction of one prompt borrows."""
        if self._load.pool_size is not None:
            return parse_bytes(self._load.pool_size, "serving.pool_size")
        assert self._load.pool_prompts is not None
        prompt = self._profile.prompt_tokens
        configs = [settled(self._profile.config(budget)) for budget in self._profile.budgets]
        whole = pool_bytes(self._loaded, prompt + self._profile.answer_tokens, configs[0].page_size)
        borrowed = max(scratch_rows(config, self._loaded.encoder, [prompt]) for config in configs)
        return self._load.pool_prompts * whole + pool_bytes(self._loaded, borrowed, configs[0].page_size)

    def _require_memory(self, budget: str) -> None:
        tokens = self._profile.prompt_tokens + self._profile.answer_tokens
        activations = activation_bytes(self._loaded, tokens, settled(self._profile.config(budget)))
        require_memory(self._pool_bytes + activations, self._loaded.model.device, None)

    def _serve(
        self, budget: str, trace: Trace, requests: list[ServingRequest], seen: "_Seen"
    ) -> tuple[float, list[ServingOutput]]:
        """Seconds from the first request to the end of the last answer, and the last outputs."""
        ended = SimpleQueue[ServingOutput]()

        def receive(output: ServingOutput) -> None:
            if output.finish_reason is not None:
                ended.put(output)

        loop = self._loop(budget, trace, seen)
        try:
            begun = time.perf_counter()
            for place, request in enumerate(requests):
                time.sleep(max(0.0, begun + place * self._load.every_s - time.perf_counter()))
                loop.submit(request, receive)
            ends = [_well(ended.get()) for _ in requests]
            return time.perf_counter() - begun, ends
        finally:
            loop.shutdown(timeout_s=0)
            trace.weigh()

    def _loop(self, budget: str, trace: Trace, metrics: ServingMetrics) -> ServingLoop:
        batch = ServingBatch.over(
            self._loaded,
            self._profile.config(budget),
            trace,
            pool_bytes=self._pool_bytes,
            chunk_tokens=self._load.chunk_tokens,
            most_running=self._load.most_running,
        )
        return ServingLoop(batch, self._loaded, queue_limit=self._load.requests, metrics=metrics)


class _Seen(ServingMetrics):
    """Keeps every observation, and the most requests that ran in one step."""

    def __init__(self) -> None:
        self.observed = defaultdict[str, list[float]](list)
        self.most_running = 0
        self._ended_in_step = 0
        super().__init__(lambda name, seconds: self.observed[name].append(seconds))

    def ended(self, outcome: str) -> None:
        super().ended(outcome)
        self._ended_in_step += 1

    def set(self, **gauges: int) -> None:
        """Called after every step, when those that ended in it are no longer counted."""
        super().set(**gauges)
        self.most_running = max(self.most_running, gauges["running"] + self._ended_in_step)
        self._ended_in_step = 0


def _lengths(profile: Profile, load: ServingLoad) -> list[int]:
    """Tokens of every prompt: spread evenly, in an order that favours nobody and is always the same."""
    shortest = load.shortest_prompt or profile.prompt_tokens
    lengths = [round(length) for length in np.linspace(profile.prompt_tokens, shortest, load.requests)]
    random.Random(0).shuffle(lengths)
    return lengths


def _well(end: ServingOutput) -> ServingOutput:
    if end.finish_reason != "length":
        raise BpkvError(
            f"A request of the load ended by {end.finish_reason!r} after {end.tokens} tokens, so the run does not "
            f"count: {end.error or 'it was not served to its end'}"
        )
    return end
