"""Ratios of the torch host against transformers' own attention and cache, all measured in this one run on one model.

    python profiles/bench_host.py [--model smollm2] [--repeats 7] [--json FILE]

A ratio compares medians of interleaved repeats; absolute times are printed only to make sense of the ratios.
"""

import argparse
import json
import pydoc_data.topics
import statistics as stats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from bpkv_trt.config import BpkvConfig
from bpkv_trt.documents import document
from bpkv_trt.models.loading import load_model
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.scratch import scratch_rows

PROMPT, LONG, DECODES = 4096, 8000, 8
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "direct": {"readout": "direct"},
    "latest_tokens_alone": {"lookahead": 0, "rehearsal": 0},
}


def config_with(**options: Any) -> BpkvConfig:
    """What is measured, unless `options` say otherwise."""
    return BpkvConfig(regime="prefill", budget="0.2", **options)


class Bench:
    """One model twice: on the pool, and as transformers runs it."""

    def __init__(self, name: str, repeats: int) -> None:
        self.ours, self.theirs, self.repeats = load_model(name), load_model(name), repeats
        self.theirs.model.set_attn_implementation("sdpa")
        text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
        self.tokens: list[int] = self.ours.tokenizer.encode(text[:60_000], add_special_tokens=False)
        assert len(self.tokens) > LONG

    def engine(self, rows: int, **options: Any) -> Engine:
        config = config_with(**options)
        scratch = scratch_rows(config, None, [rows])
        return Engine(self.ours, config, make_pool(self.ours, rows, config.page_size, scratch=scratch), Trace())

    @torch.no_grad()
    def transformers_prefill(self, length: int) -> DynamicCache:
        cache = DynamicCache()
        self.theirs.model(torch.tensor([self.tokens[:length]]), past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.no_grad()
    def transformers_decode(self, cache: DynamicCache, position: int) -> None:
        at = torch.tensor([position])
        self.theirs.model(at[None] * 0 + 42, past_key_values=cache, position_ids=at[None], cache_position=at)


def interleaved(repeats: int, **runs: Callable[[], object]) -> dict[str, float]:
    """Median seconds of every run, one of each in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: stats.median(times[1:]) for name, times in seconds.items()}


def prefill_and_compaction(bench: Bench) -> dict[str, float]:
    stages: dict[str, list[float]] = {method: [] for method in METHODS}

    def ours(method: str) -> None:
        engine = bench.engine(PROMPT + 32, **METHODS[method])
        sequence = engine.open()
        start = time.perf_counter()
        engine.encode([(sequence, bench.tokens[:PROMPT])])
        host_seconds.append(time.perf_counter() - start)
        event = engine.compactor.on_context_step_end(sequence)
        assert event is not None and event.note is None
        stages[method].append(sum(event.seconds.values()))

    host_seconds: list[float] = []
    their_seconds: list[float] = []
    for method in list(METHODS) * bench.repeats:
        start = time.perf_counter()
        bench.transformers_prefill(PROMPT)
        their_seconds.append(time.perf_counter() - start)
        ours(method)
    host, theirs = stats.median(host_seconds[1:]), stats.median(their_seconds[1:])
    return {
        "prefill_over_transformers": host / theirs,
        **{f"compaction_over_prefill_{method}": stats.median(stages[method]) / host for method in METHODS},
        "prefill_s": host,
    }


def decode(bench: Bench, length: int) -> dict[str, float]:
    """Seconds a step: ours on the full cache and at 20 %, transformers' on as many rows."""
    engine = bench.engine(2 * (length + 64 * bench.repeats))
    kept = engine.open()
    engine.encode([(kept, bench.tokens[:length])])
    full = engine.host.fork(kept)
    engine.compactor.on_context_step_end(kept)
    caches = {rows: bench.transformers_prefill(rows) for rows in (length, length // 5)}

    def ours(sequence: int) -> Callable[[], None]:
        return lambda: [engine.decode([(sequence, [42])]) for _ in range(DECODES)] and None

    def theirs(rows: int) -> Callable[[], None]:
        return lambda: (
            [bench.transformers_decode(caches[rows], caches[rows].get_seq_length()) for _ in range(DECODES)] and None
        )

    return interleaved(
        bench.repeats, full=ours(full), theirs_full=theirs(length), kept=ours(kept), theirs_kept=theirs(length // 5)
    )


def scoring_memory(bench: Bench, length: int, method: str) -> float:
    """Peak bytes allocated while a prompt is compacted, over the bytes of its keys and values."""
    engine = bench.engine(length + 32, **METHODS[method])
    sequence = engine.open()
    engine.encode([(sequence, bench.tokens[:length])])
    size = engine.pool.bytes_of(sequence)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine.compactor.on_context_step_end(sequence)
    events = recorded.profiler.kineto_results.events()
    current = peak = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        current += change
        peak = max(peak, current)
    return peak / size


def measure(bench: Bench) -> dict[str, float]:
    result = prefill_and_compaction(bench)
    short, long = decode(bench, PROMPT), decode(bench, LONG)
    result |= {
        "decode_full_over_transformers": short["full"] / short["theirs_full"],
        "decode_kept_over_transformers_same_rows": short["kept"] / short["theirs_kept"],
        "decode_kept_over_transformers_full_8000": long["kept"] / long["theirs_full"],
        "decode_kept_over_own_full_8000": long["kept"] / long["full"],
        "decode_full_s": short["full"] / DECODES,
    }
    for method in METHODS:
        for length in (1024, PROMPT):
            result[f"scoring_memory_over_kv_{method}_{length}"] = scoring_memory(bench, length, method)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options.model, options.repeats)
    body = {"model": options.model, "repeats": options.repeats, "ratios": measure(bench)}
    text = json.dumps(document(config_with(), body), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
