"""A draft is gone without a trace: for its own sequence, for what follows and for all other requests."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from tests.pool.snapshot import Snapshot
from tests.runtime.conftest import MakeEngine, loaded, prompt_tokens
from tests.runtime.drafts import AHEAD, MORE, OPTIONS, PROMPT, REGIMES
from tests.runtime.random_models import COMPACTABLE, engine_of, random_tokens, wrapped
from tests.runtime.spoiled import assert_compaction_ends_at, spoil_scores
from tests.runtime.trail import assert_masked, follow


def evict_the_same(engine: Engine, sequence: int, positions: Tensor) -> None:
    """Evict all but the rows at `positions` [L, Hkv, n] (-1: none) of a sequence that is whole."""
    view = engine.pool.view(sequence)
    evict = torch.ones(*view.lengths.shape, view.logical_length, dtype=torch.bool)
    for layer in range(evict.shape[0]):
        for head in range(evict.shape[1]):
            evict[layer, head, positions[layer, head][positions[layer, head] >= 0].long()] = False
    plan = CompactionPlan.from_eviction(view, evict)
    engine.pool.apply(plan)
    engine.statistics.compacted(sequence, plan)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("scope", ["head", "global"])
def test_what_stays_is_as_if_nothing_had_been_drafted(regime: str, scope: str) -> None:
    """The same plan applied to a sequence that never drafted: rows, pages, tokens, observers and what follows."""
    observed: dict[str, Any] = {
        "observed": frozenset({"received_attention", "query_moments"}),
        "rules": [RunningAttention(), RunningAttention(decay=0.9)],
    }
    engines, defer = [], 5 if regime == "deferred" else 0
    for options in ({**OPTIONS, "regime": regime, "defer": 5, "scope": scope}, {"policy": "full"}):
        config = engine_of("llama", **options).compactor.config
        pool = make_pool(wrapped("llama"), 120, config.page_size, poison=True)
        engines.append(Engine(wrapped("llama"), config, pool, **observed))
    ours, plain = engines
    (trail,), (other,) = (follow(engine, [PROMPT], [MORE[:defer]]) for engine in engines)
    assert trail.events[0].drafted > 0 and trail.events[0].entries_after < trail.events[0].entries_before
    evict_the_same(plain, other.sequence, ours.pool.view(trail.sequence).position_table())
    for step in (None, *MORE[defer:]):
        if step is not None:
            assert torch.equal(*(engine.decode([(0, [step])]) for engine in engines))
        assert ours.host.tokens == plain.host.tokens
        assert (ours.pool.page_table(0) == plain.pool.page_table(0)).all()
        assert ours.pool.free_pages == plain.pool.free_pages and ours.pool.bytes_of(0) == plain.pool.bytes_of(0)
        assert Snapshot.equal(ours.pool, plain.pool)
        for rule in observed["rules"]:
            assert torch.equal(*(engine.statistics.received[0].result(rule) for engine in engines))
        first, second = (engine.statistics.moments[0].result() for engine in engines)
        assert torch.equal(first.mean, second.mean) and torch.equal(first.covariance, second.covariance)


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.usefixtures("endless")
def test_evicted_is_masked_past_the_window_too(name: str, regime: str, page_size: int) -> None:
    """L2; the window of 8 is shorter than the draft, and with pages of one row no row too many is kept for it."""
    options = {**OPTIONS, "regime": f"{regime},generation", "defer": 5, "page_size": page_size}
    trails = follow(engine_of(name, **options), [PROMPT, random_tokens(3, 41)], [MORE, random_tokens(4, 9)])
    for trail in trails:
        ahead = 2 * AHEAD if regime == "deferred" else AHEAD
        assert (trail.events[0].drafted, trail.events[0].note) == (ahead, None)
        assert len(trail.engine.host.tokens[trail.sequence]) == len(trail.tokens)
        assert trail.engine.pool.logical_length(trail.sequence) == len(trail.tokens)
    assert_masked(wrapped(name), trails)


@pytest.mark.parametrize("lookahead", [5, 64])
def test_a_trained_model_keeps_what_its_window_needs(make_engine: MakeEngine, lookahead: int) -> None:
    """tiny-gemma's window is 32: the prompt is longer, the draft shorter and longer."""
    name, model = "tiny-gemma", loaded("tiny-gemma")
    assert model.traits.sliding_window == 32
    engine = make_engine(name, budget="0.3", regime="prefill", lookahead=lookahead, page_size=1)
    (trail,) = follow(engine, [prompt_tokens(name, 1, 150)], [prompt_tokens(name, 2, 60)[1:40]])
    assert 0 < trail.events[0].drafted <= lookahead
    assert_masked(model, [trail])


@pytest.mark.parametrize("call", [0, 1, 9, AHEAD, AHEAD + 1])
@pytest.mark.usefixtures("endless")
def test_nan_logits_leave_nothing_of_a_draft(call: int) -> None:
    """At its first token, in its middle, at its last, and when it is scored; the sequence goes on as if untouched."""
    engine = engine_of("llama", **OPTIONS)
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    snapshot, tokens = Snapshot(engine.pool), dict(engine.host.tokens)
    assert_compaction_ends_at(engine, sequence, call)
    snapshot.assert_unchanged()
    assert engine.host.tokens == tokens and len(tokens[sequence]) == len(PROMPT)
    full = engine_of("llama", policy="full")
    other = full.open()
    full.encode([(other, PROMPT)])
    assert torch.equal(engine.decode([(sequence, [5])]), full.decode([(other, [5])]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_scores_leave_nothing_of_a_draft(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_scores(monkeypatch, (1, 0, 20), value)
    engine = engine_of("llama", **OPTIONS)
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    snapshot = Snapshot(engine.pool)
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None and event.note == "not compacted: 1 scores are NaN or Inf"
    assert event.entries_after == event.entries_before and engine.host.tokens[sequence] == PROMPT
    snapshot.assert_unchanged()


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_request_notices_another_ones_draft(name: str, regime: str) -> None:
    """L5: in any order through one engine, and all at once, every answer is the one it gets alone."""
    prompts = [PROMPT, random_tokens(3, 37), random_tokens(4, 41)]
    options = {**OPTIONS, "regime": regime, "defer": 4}
    engine = engine_of(name, **options)
    generator, sampling = Generator(engine), SamplingParams(max_new_tokens=12)
    alone = []
    for prompt in prompts:
        fresh = Generator(engine_of(name, **options))
        (request,) = fresh.generate([fresh.add([prompt], sampling)])
        assert request.events[0].note is None
        alone.append(request.generated)
    for order in itertools.permutations(range(3)):
        for index in order:
            (request,) = generator.generate([generator.add([prompts[index]], sampling)])
            assert request.generated == alone[index]
    together = generator.generate([generator.add([prompt], sampling) for prompt in prompts])
    assert [request.generated for request in together] == alone
    assert engine.pool.live_pages == 0 and engine.host.tokens == {}
