"""Laws L1 and L2 on every covered architecture, past its window and with all its switches on."""

import pytest
import torch

from tests.runtime.random_models import ARCHITECTURES, COMPACTABLE, engine_of, random_tokens, wrapped
from tests.runtime.trail import assert_masked, follow

LENGTHS, STEPS = (70, 9, 41), (20, 3, 9)  # unequal; shorter and longer than the window of 8


def batch() -> tuple[list[list[int]], list[list[int]]]:
    prompts = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]
    return prompts, [random_tokens(10 + seed, steps) for seed, steps in enumerate(STEPS)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_full_cache_is_the_models_own(name: str) -> None:
    assert_masked(wrapped(name), follow(engine_of(name, policy="full"), *batch()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keeping_all_is_the_full_cache_bit_for_bit(name: str) -> None:
    options = {"budget": "1.0", "generation_budget": "9999t"}
    kept, full = (follow(engine_of(name, **extra), *batch()) for extra in (options, {"policy": "full"}))
    for ours, theirs in zip(kept, full, strict=True):
        assert all(event.entries_after == event.entries_before for event in ours.events)
        assert all(torch.equal(ours.logits[index], logits) for index, logits in theirs.logits.items())


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize(("readout", "scope"), [("direct", "head"), ("exact", "global")])
def test_evicted_is_masked(name: str, readout: str, scope: str) -> None:
    trails = follow(engine_of(name, budget="0.3", readout=readout, scope=scope), *batch())
    for trail in trails[::2]:
        assert [event.regime for event in trail.events][:2] == ["prefill", "generation"]
        assert trail.events[0].entries_after < trail.events[0].entries_before
    assert trails[0].events[2].entries_after < trails[0].events[2].entries_before, "generated entries went too"
    assert_masked(wrapped(name), trails)


@pytest.mark.parametrize("name", ["llama_bias_rope", "gemma2", "gemma3", "qwen2_sliding"])
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "expected_attention"])
def test_evicted_is_masked_by_every_policy_that_needs_statistics(name: str, policy: str) -> None:
    assert_masked(wrapped(name), follow(engine_of(name, budget="0.3", policy=policy), *batch()))


@pytest.mark.parametrize(
    "options",
    [{"readout": "direct"}, {"readout": "exact"}, {"policy": "h2o"}, {"policy": "expected_attention"}],
    ids=str,
)
def test_a_model_of_sliding_layers_alone_runs_and_evicts_nothing(options: dict[str, str]) -> None:
    trails = follow(engine_of("mistral_sliding", budget="0.3", **options), *batch())
    for trail in trails:
        assert all(event.entries_before == event.entries_after == 0 for event in trail.events)
        assert all(event.note is not None and "every layer" in event.note for event in trail.events)
    assert_masked(wrapped("mistral_sliding"), trails)


@pytest.mark.parametrize("name", ["mistral_sliding", "gemma3"])
def test_rows_behind_the_window_are_freed(name: str) -> None:
    engine = engine_of(name, rows=400, policy="full")
    (trail,) = follow(engine, [random_tokens(1, 300)], [random_tokens(2, 5)])
    for layer in engine.host.traits.sliding_layers:
        assert int(engine.pool.lengths(trail.sequence)[layer].max()) < 100
    assert_masked(wrapped(name), [trail])
