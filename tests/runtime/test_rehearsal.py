"""A rehearsal: what it measures, by transformers' eager attention; that nothing is left of it; and what it secures."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.evidence import score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.rehearsal import Rehearsal, carried_over
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.errors import PoolExhausted
from bpkv_trt.policies.registry import settled
from bpkv_trt.runtime import rehearsal, torch_statistics
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.rehearsal import passages, rehearse
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.scratch import scratch_rows
from bpkv_trt.runtime.torch_host import TorchHost
from tests.pool.snapshot import Snapshot
from tests.runtime.conftest import MakeEngine, prompt_tokens
from tests.runtime.random_models import COMPACTABLE, SMALL, engine_of, plain_copy, random_tokens, wrapped
from tests.runtime.spoiled import assert_compaction_ends_at
from tests.runtime.test_observers import HALVES
from tests.runtime.trail import assert_masked, follow

PROMPT, MORE = random_tokens(1, 50), random_tokens(2, 12)
PASSAGE, LEAD, SINKS = 10, 8, 3
COUNTS = {"less than a passage": 7, "two passages": 25, "all": 1000}
CALLS = {7: 1, 25: 2, 1000: 5}  # forward passes
OPTIONS: dict[str, Any] = {"budget": "0.4", "regime": "prefill", "lookahead": 4, "rehearsal": 25}


@pytest.fixture(autouse=True)
def short_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a prompt of the small models has several."""
    monkeypatch.setattr(rehearsal, "PASSAGE", PASSAGE)
    monkeypatch.setattr(rehearsal, "ROWS", LEAD + PASSAGE)


def encoded(engine: Engine, prompt: list[int] = PROMPT) -> int:
    sequence = engine.open()
    engine.encode([(sequence, prompt)])
    return sequence


def compacted(engine: Engine, prompt: list[int] = PROMPT) -> tuple[int, CompactionEvent]:
    sequence = encoded(engine, prompt)
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None
    return sequence, event


# Which passages


@given(start=st.integers(0, 9), length=st.integers(0, 500), count=st.integers(1, 600))
def test_passages_lie_apart_in_their_order_and_one_in_every_part(start: int, length: int, count: int) -> None:
    """Short of `count` by less than a passage; each in a part of its own of as many equal ones, but for rounding."""
    context = range(start, start + length)
    parts = passages(context, count)
    positions = [position for part in parts for position in part]
    assert positions == sorted(set(positions)) and set(positions) <= set(context)
    if count >= length:
        assert positions == list(context)
        assert all(len(part) == PASSAGE for part in parts[:-1])
        return
    assert count - PASSAGE < len(positions) <= count
    assert {len(part) for part in parts} == {min(count, PASSAGE)}
    share = length / len(parts)
    for index, part in enumerate(parts):
        assert start + index * share - 1 < part.start and part.stop < start + (index + 1) * share + 1


# What is measured


def eager_attention(name: str, tokens: list[int], part: range) -> Tensor:
    """[L, Hkv, len(part)]: the most from the tokens behind, where a passage and what leads to it come once more."""
    model, traits = plain_copy(name), wrapped(name).traits
    again = tokens[max(part.start - LEAD, 0) : part.stop]
    weights = model(torch.tensor([[*tokens, *again]]), output_attentions=True, use_cache=False).attentions
    largest = torch.zeros(traits.layers, traits.kv_heads, len(part))
    for layer in traits.compactable_layers:
        by_group = weights[layer][0, :, len(tokens) :, part.start : part.stop].unflatten(0, (traits.kv_heads, -1))
        largest[layer] = by_group.amax((1, 2))
    return largest


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_an_entry_has_the_most_attention_that_its_own_passage_gives_it(name: str, count: int) -> None:
    """While that follows the whole sequence, which stays in the softmax; past a window that is shorter."""
    engine = engine_of(name, policy="full")
    measured = rehearse(engine.host, encoded(engine), count, SINKS)
    assert measured is not None
    parts = passages(range(SINKS, len(PROMPT)), count)
    assert len(parts) == CALLS[count]
    assert measured.positions.tolist() == [position for part in parts for position in part]
    truth = torch.cat([eager_attention(name, PROMPT, part) for part in parts], dim=-1)
    torch.testing.assert_close(measured.attention, truth, rtol=1e-3, atol=1e-6)
    assert measured.attention[sorted(wrapped(name).traits.sliding_layers)].eq(0).all()


def test_tokens_that_were_decoded_are_rehearsed_as_well() -> None:
    engine = engine_of("llama", policy="full")
    (trail,) = follow(engine, [PROMPT], [MORE[:5]])
    measured = rehearse(engine.host, trail.sequence, 1000, SINKS)
    assert measured is not None and measured.positions.tolist() == list(range(SINKS, len(PROMPT) + 5))
    last = range(SINKS + 5 * PASSAGE, len(PROMPT) + 5)
    truth = eager_attention("llama", [*PROMPT, *MORE[:5]], last)
    torch.testing.assert_close(measured.attention[..., -len(last) :], truth, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("length", "count"), [(SINKS, 25), (SINKS - 1, 25), (50, 0)])
def test_without_anything_to_rehearse_nothing_is_run(length: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", policy="full")
    sequence = encoded(engine, PROMPT[:length])
    monkeypatch.setattr(engine.host, "forward", None)
    assert rehearse(engine.host, sequence, count, SINKS) is None
    assert engine.statistics.rehearse(sequence, 0, engine.trace) is None


# As if nothing had been rehearsed


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_sequence_is_as_it_was_and_goes_on_as_it_would(name: str, page_size: int, count: int) -> None:
    """Pages, tokens and all that is observed; with a window of 8 and pages of one row no row too many is kept."""
    loaded, rule = wrapped(name), RunningAttention(decay=0.9)
    required = ["received_attention", "query_moments"] if name in HALVES else ["received_attention"]
    observed: dict[str, Any] = {"observed": frozenset(required), "rules": [rule]}
    config = BpkvConfig(**{**SMALL, "page_size": page_size, "policy": "full", "generation_budget": "14t"})
    engines = [Engine(loaded, config, make_pool(loaded, 100, page_size, poison=True), **observed) for _ in range(2)]
    (sequence, _), ours = (encoded(engine) for engine in engines), engines[0]
    snapshot = Snapshot(ours.pool)
    assert ours.statistics.rehearse(sequence, count, ours.trace) is not None
    snapshot.assert_unchanged()
    for token in (None, *MORE):
        if token is not None:
            assert torch.equal(*(engine.decode([(sequence, [token])]) for engine in engines))
        assert ours.host.tokens == engines[1].host.tokens and Snapshot.equal(ours.pool, engines[1].pool)
        assert torch.equal(*(engine.statistics.received[sequence].result(rule) for engine in engines))
        if name in HALVES:
            first, second = (engine.statistics.moments[sequence].result() for engine in engines)
            assert torch.equal(first.mean, second.mean) and torch.equal(first.covariance, second.covariance)


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("regime", ["prefill", "deferred"])
def test_evicted_is_masked(name: str, regime: str) -> None:
    """L2, for two prompts of a batch."""
    engine = engine_of(name, **{**OPTIONS, "regime": f"{regime},generation", "defer": 5, "page_size": 1})
    trails = follow(engine, [PROMPT, random_tokens(3, 41)], [MORE, random_tokens(4, 9)])
    for trail in trails:
        assert trail.events[0].note is None and trail.events[0].entries_after < trail.events[0].entries_before
        assert engine.pool.logical_length(trail.sequence) == len(trail.tokens)
    assert_masked(wrapped(name), trails)


# When something goes wrong


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("missing", [0, 1, PASSAGE, LEAD + PASSAGE])
def test_without_room_for_a_passage_nothing_is_run(count: int, missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", rows=len(PROMPT) + LEAD + PASSAGE - missing, caches=1, page_size=1, policy="full")
    sequence = encoded(engine)
    if missing == 0:
        assert rehearse(engine.host, sequence, count, SINKS) is not None
        return
    snapshot = Snapshot(engine.pool)
    monkeypatch.setattr(engine.host.model, "forward", None)
    with pytest.raises(PoolExhausted, match=f"cannot hold {LEAD + PASSAGE} more tokens"):
        rehearse(engine.host, sequence, count, SINKS)
    snapshot.assert_unchanged()
    assert engine.host.tokens[sequence] == PROMPT


@pytest.mark.parametrize("call", [0, 1, 4])
def test_nan_logits_leave_nothing_of_a_passage(call: int) -> None:
    """In the first, the second and the last; the compaction ends there, and the sequence goes on as if untouched."""
    engine = engine_of("llama", **{**OPTIONS, "rehearsal": 1000})
    sequence = encoded(engine)
    snapshot = Snapshot(engine.pool)
    assert_compaction_ends_at(engine, sequence, call)
    snapshot.assert_unchanged()
    assert engine.host.tokens == {sequence: PROMPT}
    full = engine_of("llama", policy="full")
    assert torch.equal(engine.decode([(sequence, [5])]), full.decode([(encoded(full), [5])]))


# What it secures


def best(table: Tensor, eligible: range, heads: list[tuple[int, int]], count: int) -> set[tuple[int, int, int]]:
    """(layer, head, position) of the `count` entries of some heads that have most in the table [L, Hkv, T]."""
    entries = [(*each, position) for each in heads for position in eligible]
    return set(sorted(entries, key=lambda entry: -float(table[entry]))[:count])


def held(engine: Engine, sequence: int) -> set[tuple[int, int, int]]:
    layers, heads = engine.pool.lengths(sequence).shape
    each = itertools.product(range(layers), range(heads))
    return {(*at, position) for at in each for position in engine.pool.positions(sequence, *at).tolist()}


@pytest.mark.parametrize("scope", ["global", "layer", "head"])
@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_of_what_a_unit_keeps_its_share_is_what_the_rehearsal_shows(
    make_engine: MakeEngine, scope: str, share: float
) -> None:
    """Protected entries are part of it; with a share of 1 nothing else stays."""
    prompt, options = prompt_tokens("tiny-llama", 1, 150), {**OPTIONS, "scope": scope, "rehearsal": 60}
    engine, other = (make_engine("tiny-llama", **options, safeguard=share) for _ in range(2))
    config, traits = engine.compactor.config, engine.host.traits
    sequence, event = compacted(engine, prompt)
    assert event.note is None and event.drafted > 0
    apart = encoded(other, prompt)
    measured = other.statistics.rehearse(apart, 60, other.trace)
    assert isinstance(measured, Rehearsal) and 0 < len(measured.positions) <= 60
    table = carried_over(measured, other.pool.view(apart), traits)
    layers, heads = range(traits.layers), range(traits.kv_heads)
    units = {
        "global": [list(itertools.product(layers, heads))],
        "layer": [[(layer, head) for head in heads] for layer in layers],
        "head": [[each] for each in itertools.product(layers, heads)],
    }[scope]
    eligible, kept = range(config.sinks, len(prompt) - config.recent), int(0.4 * len(prompt))
    secured = set[tuple[int, int, int]]()
    for unit in units:
        count = int(share * kept * len(unit)) - config.protected * len(unit)
        assert count > 0
        secured |= best(table, eligible, unit, count)
    stays = held(engine, sequence)
    assert secured <= stays
    if share == 1:
        of_own = {*range(config.sinks), *range(eligible.stop, len(prompt))}
        assert stays == secured | {(*each, position) for unit in units for each in unit for position in of_own}
    plain, _ = compacted(without := make_engine("tiny-llama", **{**options, "rehearsal": 0}, safeguard=share), prompt)
    assert not secured <= held(without, plain), "the latest attention secures the same"


def test_neighbours_share_their_scores_where_nothing_was_rehearsed(make_engine: MakeEngine) -> None:
    prompt = prompt_tokens("tiny-llama", 1, 90)
    engine = make_engine("tiny-llama", **OPTIONS)
    view = engine.pool.view(sequence := encoded(engine, prompt))
    statistics = engine.statistics.collect(sequence, 6, engine.trace)
    alone = score_entries(EvidenceSource(statistics, view, engine.host.traits), statistics.readout.divergence).double()
    rehearsed = replace(statistics, rehearsal=engine.statistics.rehearse(sequence, 25, engine.trace))
    assert torch.equal(engine.compactor.policy.score(rehearsed, view).double(), alone)
    near = [alone[..., max(0, row - 2) : row + 3].sum(-1) / 5 for row in range(90)]
    torch.testing.assert_close(engine.compactor.policy.score(statistics, view).double(), torch.stack(near, -1))


def counted_rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens were asked for, whenever something is rehearsed."""
    asked: list[int] = []

    def kept(host: TorchHost, sequence: int, count: int, sinks: int) -> Rehearsal | None:
        asked.append(count)
        return rehearse(host, sequence, count, sinks)

    monkeypatch.setattr(torch_statistics, "rehearse", kept)
    return asked


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"regime": "prefill,generation"}, [25]),
        ({"regime": "deferred,generation"}, [25]),
        ({"regime": "generation", "lookahead": 0, "rehearsal": 0}, []),
        ({"rehearsal": 0}, []),
        ({"preset": "paper", "positions": 5, "recent": 12, "safeguard": 0.5}, [25]),  # both are given
        ({"budget": "1"}, []),
        ({"policy": "full"}, []),
    ],
    ids=str,
)
def test_a_prompt_is_rehearsed_once_where_something_goes_and_an_answer_never(
    options: dict[str, Any], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted_rehearsals(monkeypatch)
    (trail,) = follow(engine_of("llama", **{**OPTIONS, "defer": 5, **options}), [PROMPT], [random_tokens(2, 30)])
    assert trail.events and counts == asked
    assert [0 < event.rehearsed <= 25 for event in trail.events] == [bool(asked), *[False] * (len(trail.events) - 1)]


@pytest.mark.parametrize("options", [{"policy": "snapkv"}, {"preset": "paper", "recent": 40}], ids=str)
def test_others_rehearse_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers, and the method as it was published."""
    counts, without = counted_rehearsals(monkeypatch), {name: OPTIONS[name] for name in ("budget", "regime")}
    _, event = compacted(
        engine_of("llama", **{**without, "generation_budget": "40t", **options}), random_tokens(1, 110)
    )
    assert event.note is None and event.entries_after < event.entries_before and not counts


# Room


@pytest.mark.parametrize("regime", ["prefill", "deferred"])
@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("lookahead", [0, 4, 30])
def test_a_pool_with_just_enough_pages_works_and_a_smaller_one_refuses_at_once(
    regime: str, page_size: int, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is rehearsed is gone before anything is drafted: the longer of the two counts."""
    monkeypatch.setattr(wrapped("llama").model.generation_config, "eos_token_id", None)
    options = {**OPTIONS, "regime": regime, "defer": 3, "page_size": page_size, "lookahead": lookahead}
    scratch = max(LEAD + PASSAGE, lookahead * (2 if regime == "deferred" else 1))
    enough = -(-(len(PROMPT) + 4) // page_size) + -(-scratch // page_size)
    assert scratch_rows(settled(BpkvConfig(**{**SMALL, "generation_budget": "14t", **options})), None, [50]) == scratch

    def generator(pages: int) -> Generator:
        return Generator(engine_of("llama", rows=pages * page_size, caches=1, **options))

    works, counts = generator(enough), counted_rehearsals(monkeypatch)
    (request,) = works.generate([works.add([PROMPT], SamplingParams(max_new_tokens=4))])
    assert request.finished == "length" and request.events[0].note is None and counts == [25]
    assert works.engine.pool.live_pages == 0
    monkeypatch.setattr(TorchHost, "forward", None)
    smaller = generator(enough - 1)
    with pytest.raises(PoolExhausted, match=f"need {enough * 4} pages, and the pool has {enough * 4 - 4} in all"):
        smaller.add([PROMPT], SamplingParams(max_new_tokens=4))
    assert not smaller.waiting and smaller.engine.pool.live_pages == 0


def test_requests_of_a_batch_rehearse_in_turn_in_the_same_scratch_pages() -> None:
    """L5: and each gets the answer that it gets alone."""
    prompts, sampling = [PROMPT, random_tokens(3, 41)], SamplingParams(max_new_tokens=8)
    pages = sum(-(-(len(prompt) + 8) // 4) for prompt in prompts) + -(-(LEAD + PASSAGE) // 4)
    together = Generator(engine_of("llama", rows=pages * 4, caches=1, **OPTIONS))
    requests = [together.add([prompt], sampling) for prompt in prompts]
    assert together.step() == requests, "both are admitted at once"
    together.generate(requests)
    for request, prompt in zip(requests, prompts, strict=True):
        alone = Generator(engine_of("llama", **OPTIONS))
        (same,) = alone.generate([alone.add([prompt], sampling)])
        assert request.generated == same.generated and request.events[0].entries_after == same.events[0].entries_after
