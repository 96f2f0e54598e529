"""What contenders share on a sample changes nothing that is measured: each alone, and after all the others."""

from dataclasses import replace

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.rehearsal import Rehearsal
from bpkv_trt.evaluation.encoded import EncodedSample, encode_sample
from bpkv_trt.evaluation.reference import reference_of
from bpkv_trt.evaluation.tasks import make_sample
from bpkv_trt.evaluation.trial import Trial, run_trial
from bpkv_trt.models.stop_tokens import stop_tokens_of
from bpkv_trt.policies.registry import settled
from bpkv_trt.runtime import torch_statistics
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.rehearsal import rehearse
from bpkv_trt.runtime.remembered_statistics import Memory
from bpkv_trt.runtime.torch_host import TorchHost
from tests.evaluation.small_comparison import tiny_llama

CONTENDERS: list[dict[str, object]] = [
    {},
    {"budget": "0.5"},
    {"regime": "deferred"},
    {"regime": "deferred", "budget": "0.5"},
    {"readout": "direct"},
    {"lookahead": 3},
    {"rehearsal": 0},
    {"rehearsal": 100},
    {"rehearsal": 100, "sinks": 2},
    {"rehearsal": 100, "safeguard": 0.8, "scope": "layer"},
    {"rehearsal": 100, "regime": "deferred"},
    {"rehearsal": 100, "regime": "deferred", "lookahead": 0},
    {"probes": 2},
    {"regime": "prefill,generation", "interval": 8, "generation_budget": "16t"},
    {"policy": "snapkv"},
    {"policy": "snapkv", "lookahead": 6},
    {"policy": "h2o"},
    {"policy": "kvzip"},
    {"policy": "kvzip", "budget": "0.5"},
]


def sample() -> EncodedSample:
    loaded = tiny_llama()

    def count(text: str) -> int:
        return len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode_sample(loaded, make_sample("passkey", 5, 380, count, 12))


def near(first: float | None, second: float | None) -> bool:
    return first == second if first is None or second is None else first == pytest.approx(second, rel=1e-3)


def assert_same(first: Trial, second: Trial) -> None:
    """But for the clock, and for the rounding of a draft that is run in one pass where it was decoded at first."""
    assert first.gap is not None and second.gap is not None
    assert first.gap.kl == pytest.approx(second.gap.kl, rel=1e-3, abs=1e-8)
    assert (first.gap.top1, first.correct) == (second.gap.top1, second.correct)
    assert first.retention.tolist() == second.retention.tolist()
    assert near(first.one_step_kl, second.one_step_kl)
    for one, other in zip(first.events, second.events, strict=True):
        numbers = ("estimated_kl", "estimated_kl_stage1", "covered_mass")
        for name in numbers:
            assert near(getattr(one, name), getattr(other, name))
        rest = {**dict.fromkeys(numbers), "seconds": {}}
        assert replace(one, **rest) == replace(other, **rest)
        assert bool(one.seconds.get("readout")) == bool(other.seconds.get("readout"))  # credited


def test_what_is_remembered_is_what_would_be_found_again() -> None:
    loaded, common = tiny_llama(), {"recent": 16, "positions": 4, "defer": 4, "page_size": 8, "lookahead": 6}
    configs = []
    for options in CONTENDERS:
        peer = "policy" in options
        shared = {name: value for name, value in common.items() if not (peer and name == "lookahead")}
        configs.append(settled(BpkvConfig(**{**shared, "regime": "prefill", **options})))
    observed = frozenset({"received_attention"})
    pool = make_pool(loaded, 480, 8, caches=6)
    base = Engine(loaded, BpkvConfig(policy="full", page_size=8), pool, observed=observed, replayed=64)  # type: ignore[arg-type]
    with reference_of(base, sample(), 24, 4, stop_tokens_of(loaded.model, loaded.tokenizer)) as reference:
        alone = [run_trial(loaded, config, replace(reference, memory=Memory())) for config in configs]
        shared_trials = [run_trial(loaded, config, reference) for config in (*configs, *reversed(configs))]
        assert len(reference.memory.statistics) < 2 * len(configs), "nothing was shared"
    for one, first, again in zip(alone, shared_trials, reversed(shared_trials), strict=False):
        assert_same(first, one)
        assert_same(again, one)


def test_a_whole_cache_is_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of its copies; for another number of tokens or of sinks, or a longer sequence, it is rehearsed again."""
    loaded, asked = tiny_llama(), list[tuple[int, int]]()

    def counted(host: TorchHost, sequence: int, count: int, sinks: int) -> Rehearsal | None:
        asked.append((count, sinks))
        return rehearse(host, sequence, count, sinks)

    monkeypatch.setattr(torch_statistics, "rehearse", counted)
    given = {"recent": 16, "positions": 4, "page_size": 8, "lookahead": 0, "regime": "prefill", "readout": "direct"}
    pool, memory = make_pool(loaded, 480, 8, caches=3), Memory()
    base = Engine(loaded, BpkvConfig(policy="full", page_size=8), pool, replayed=64)
    sequence = base.open()
    base.encode([(sequence, sample().turns[0])])
    for options, repeated in (
        ({"rehearsal": 100}, 1),
        ({"rehearsal": 100, "budget": "0.5", "safeguard": 0.8}, 1),
        ({"rehearsal": 100, "scope": "head", "pooling": 1, "refine": 0}, 1),
        ({"rehearsal": 70}, 2),
        ({"rehearsal": 70, "sinks": 2}, 3),
        ({"rehearsal": 0}, 3),
        ({"rehearsal": 100}, 3),
    ):
        engine = Engine(loaded, settled(BpkvConfig(**{**given, **options})), pool, memory=memory)
        copy = engine.adopt(base, sequence)
        event = engine.compactor.on_context_step_end(copy)
        assert event is not None and event.note is None and len(asked) == repeated
        engine.close(copy)
    assert asked == [(100, 4), (70, 4), (70, 2)]
    base.decode([(sequence, [5])])
    engine.compactor.on_context_step_end(engine.adopt(base, sequence))
    assert asked[3:] == [(100, 4)]


def test_a_memory_is_for_whole_caches() -> None:
    loaded = tiny_llama()
    config = settled(BpkvConfig(recent=16, positions=4, page_size=8, regime="prefill", lookahead=4, readout="direct"))
    engine = Engine(loaded, config, make_pool(loaded, 420, 8, caches=2), memory=(memory := Memory()))
    sequence = engine.open()
    engine.encode([(sequence, sample().turns[0])])
    engine.compactor.on_context_step_end(sequence)
    assert len(memory.statistics) == 1
    first = engine.statistics.collect(sequence, 4, engine.trace)
    second = engine.statistics.collect(sequence, 4, engine.trace)
    assert len(memory.statistics) == 1 and first is not second
