"""The look ahead: what is drafted is the model's own, judged as if it were real, and gone without a trace."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.evidence import EvidenceSource, score_entries
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.errors import PoolExhausted
from bpkv_trt.policies.bpkv import Bpkv
from bpkv_trt.policies.snapkv import SnapKv
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.torch_host import TorchHost
from tests.pool.snapshot import Snapshot
from tests.runtime.conftest import TRAINED, MakeEngine, loaded, prompt_tokens
from tests.runtime.masked_reference import MaskedReference
from tests.runtime.random_models import COMPACTABLE, engine_of, plain_copy, random_tokens, wrapped
from tests.runtime.spoiled import assert_compaction_ends_at
from tests.runtime.trail import assert_masked, follow

PROMPT, MORE = random_tokens(1, 50), random_tokens(2, 12)
AHEAD = 20
REGIMES = ("prefill", "deferred")
OPTIONS: dict[str, Any] = {"budget": "0.4", "regime": "prefill", "lookahead": AHEAD, "rehearsal": 0}


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer."""
    for name in COMPACTABLE:
        for each in (wrapped(name), wrapped(name, torch.float32)):  # cached apart
            monkeypatch.setattr(each.model.generation_config, "eos_token_id", None)


@dataclass
class Spy:
    """What an engine's compactions were told: the tokens behind the sequence, and the statistics."""

    drafts: list[list[int]]
    statistics: list[ForwardStatistics]


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch, length: int) -> Spy:
    """`length`: tokens that are the sequence's own."""
    spy, collect = Spy([], []), engine.statistics.collect

    def kept(sequence: int, positions: int, trace: Any, drafted: Sequence[float]) -> ForwardStatistics:
        spy.drafts.append(engine.host.tokens[sequence][length:])
        spy.statistics.append(collect(sequence, positions, trace, drafted))
        return spy.statistics[-1]

    monkeypatch.setattr(engine.statistics, "collect", kept)
    return spy


def greedy(name: str, tokens: list[int], count: int) -> list[int]:
    """transformers' own continuation, without the token that ends it."""
    ids, model = torch.tensor([tokens]), plain_copy(name)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    answer: list[int] = whole[0, len(tokens) :].tolist()
    ends = {model.generation_config.eos_token_id}
    return answer[:-1] if answer[-1] in ends else answer


def compacted(engine: Engine, prompt: list[int]) -> tuple[int, CompactionEvent]:
    """A prompt of its own, encoded and compacted."""
    sequence = engine.open()
    engine.encode([(sequence, prompt)])
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None
    return sequence, event


# What is drafted


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.usefixtures("endless")
def test_a_draft_is_the_models_own_greedy_continuation(name: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(name, **{**OPTIONS, "regime": regime, "defer": 5})
    own = [*PROMPT, *MORE[:5]] if regime == "deferred" else PROMPT
    spy = watched(engine, monkeypatch, len(own))
    (trail,) = follow(engine, [PROMPT], [MORE[:5]])
    expected = greedy(name, own, AHEAD)
    if regime == "deferred":  # the answer has taken another turn than the draft at the end of the prompt
        expected += greedy(name, PROMPT, AHEAD)
    assert spy.drafts == [expected] and [event.drafted for event in trail.events] == [len(expected)]
    first = len(own) - engine.compactor.config.scoring_positions
    assert spy.statistics[0].positions.tolist() == list(range(first, len(own) + len(expected)))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.usefixtures("endless")
def test_what_has_come_true_of_a_draft_is_continued(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(name, **{**OPTIONS, "regime": "deferred", "defer": 5})
    answer = greedy(name, PROMPT, 5 + AHEAD)
    spy = watched(engine, monkeypatch, len(PROMPT) + 5)
    (trail,) = follow(engine, [PROMPT], [answer[:5]])
    assert spy.drafts == [answer[5:]] and trail.events[0].drafted == AHEAD


@pytest.mark.parametrize("place", [0, 1, 7])
@pytest.mark.usefixtures("endless")
def test_a_draft_ends_before_a_stop_token(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = greedy("llama", PROMPT, AHEAD)
    stop = answer[place]
    monkeypatch.setattr(wrapped("llama", torch.float32).model.generation_config, "eos_token_id", [2, stop])
    engine = engine_of("llama", **OPTIONS)
    spy = watched(engine, monkeypatch, len(PROMPT))
    sequence, event = compacted(engine, PROMPT)
    assert spy.drafts == [answer[: answer.index(stop)]] and event.drafted == len(spy.drafts[0])
    assert event.note is None and event.entries_after < event.entries_before
    assert engine.pool.logical_length(sequence) == len(PROMPT)
    if place == 0:  # nothing lies ahead: the same as not to look
        other, plain = engine_of("llama", **{**OPTIONS, "lookahead": 0}), compacted
        there, without = plain(other, PROMPT)
        assert event.drafted == 0 and event.estimated_kl == without.estimated_kl
        tables = [each.pool.view(one).position_table() for each, one in ((engine, sequence), (other, there))]
        assert torch.equal(*tables)


def test_the_end_of_an_answer_is_also_the_tokenizers(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("tiny-llama", "float32")
    monkeypatch.setattr(model.model.generation_config, "eos_token_id", 7)
    assert make_engine("tiny-llama").statistics.stop_tokens == {7, model.tokenizer.eos_token_id}


def test_where_nothing_goes_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: a budget of 1, a short prompt, a policy that evicts nothing; and an answer's compaction never drafts."""
    for options in ({"budget": "1"}, {"recent": 48, "generation_budget": "48t"}, {"policy": "full"}):
        engine = engine_of("llama", **{**OPTIONS, **options})
        monkeypatch.setattr(engine.host, "replay", None)
        _, event = compacted(engine, PROMPT)
        assert event.drafted == 0 and event.entries_after == event.entries_before
    generation = {name: value for name, value in OPTIONS.items() if name not in ("lookahead", "rehearsal")}
    (trail,) = follow(engine_of("llama", **{**generation, "regime": "generation"}), [PROMPT], [random_tokens(2, 24)])
    assert len(trail.events) == 3 and {event.drafted for event in trail.events} == {0}


# As if nothing had been drafted


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
    assert_masked(name, trails)


@pytest.mark.parametrize("lookahead", [5, 64])
def test_a_trained_model_keeps_what_its_window_needs(make_engine: MakeEngine, lookahead: int) -> None:
    """tiny-gemma's window is 32: the prompt is longer, the draft shorter and longer."""
    name, model = "tiny-gemma", loaded("tiny-gemma")
    assert model.traits.sliding_window == 32
    engine = make_engine(name, budget="0.3", regime="prefill", lookahead=lookahead, page_size=1)
    (trail,) = follow(engine, [prompt_tokens(name, 1, 150)], [prompt_tokens(name, 2, 60)[1:40]])
    assert 0 < trail.events[0].drafted <= lookahead
    truth = MaskedReference(copy.deepcopy(model.model), dict.fromkeys(model.traits.sliding_layers, 32)).logits(
        trail.tokens, trail.hidden_from()
    )
    for index, logits in trail.logits.items():
        assert float((logits - truth[index]).abs().max() / truth[index].abs().max()) < 1e-5


# How drafted tokens are judged


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("readout", ["direct", "exact"])
@pytest.mark.usefixtures("endless")
def test_drafted_positions_are_those_of_a_real_sequence(name: str, readout: str) -> None:
    """Scores of the prompt's entries are those of a sequence that has the draft as its own last tokens."""
    drafting, real = (engine_of(name, **OPTIONS, readout=readout) for _ in range(2))
    count = drafting.compactor.config.positions + AHEAD
    sequence, other = drafting.open(), real.open()
    drafting.encode([(sequence, PROMPT)])
    with drafting.statistics.look_ahead(sequence, AHEAD, drafting.trace) as drafted:
        assert drafted == (1.0,) * AHEAD
        real.encode([(other, drafting.host.tokens[sequence])])
        both = [
            (engine.statistics.collect(one, count, engine.trace, behind), engine.pool.view(one))
            for engine, one, behind in ((drafting, sequence, drafted), (real, other, ()))
        ]
        (ours, theirs) = both
        assert torch.equal(ours[0].positions, theirs[0].positions)
        assert torch.equal(ours[0].topk_ids, theirs[0].topk_ids)
        for field in ("q", "context", "residual", "topk_p", "covered_mass"):
            assert_near(getattr(ours[0], field), getattr(theirs[0], field))
        layers = list(wrapped(name).traits.compactable_layers)
        entries = [score_entries(*each, wrapped(name).traits)[layers, :, : len(PROMPT)] for each in both]
        assert_near(*(each.log() for each in entries))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-3


@contextmanager
def guessing(engine: Engine, answer: list[int]) -> Iterator[tuple[int, tuple[float, ...]]]:
    """A draft at the end of the prompt, then an answer, then the look ahead: the sequence, and the weights given."""
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    engine.statistics.draft_answer(sequence, AHEAD, engine.trace)
    for token in answer:
        engine.decode([(sequence, [token])])
    with engine.statistics.look_ahead(sequence, AHEAD, engine.trace) as weights:
        yield sequence, tuple(weights)


GUESSING = {**OPTIONS, "regime": "deferred", "defer": 5}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.usefixtures("endless")
def test_a_draft_weighs_a_tenth_where_it_has_not_come_true(name: str) -> None:
    for answer, guesses in ((MORE[:5], AHEAD), (greedy(name, PROMPT, 5), 0)):
        with guessing(engine_of(name, **GUESSING), answer) as (_, weights):
            assert weights == (1.0,) * AHEAD + (0.1,) * guesses


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.usefixtures("endless")
def test_exact_scores_are_the_weighted_mean_of_those_of_each_position(name: str) -> None:
    """1/2 (dz . xi)^2 for dz . xi = a / (1 - a) (c - v) . row, position by position in float64; weights 1 and 0.1."""
    engine, traits = engine_of(name, **GUESSING, readout="exact", probes=2), wrapped(name).traits
    own, length = engine.compactor.config.scoring_positions, len(PROMPT) + 5
    with guessing(engine, MORE[:5]) as (sequence, weights):
        statistics = engine.statistics.collect(sequence, own + len(weights), engine.trace, weights)
        view = engine.pool.view(sequence)
        scores, source = score_entries(statistics, view, traits), EvidenceSource(statistics, view, traits)
        assert statistics.drafted == len(weights) == 2 * AHEAD
        for layer, rows in source.rows():
            for head in range(traits.kv_heads):
                held = source.attention(layer, head)
                a, c, v = held.a.double(), held.c.double(), held.v.double()  # [G, M, T], [M, G, D], [T, D]
                total = torch.zeros(a.shape[-1], dtype=torch.float64)
                for m, weight in enumerate([1.0] * (own + AHEAD) + [0.1] * AHEAD):
                    moved = (c[m, :, None] - v) * (a[:, m] / (1 - a[:, m]))[..., None]  # [G, T, D]
                    read = torch.einsum("gtd,rgd->rt", moved, rows[m, :, head].double())
                    total += weight * read.square().mean(0) / 2
                truth = total / (own + AHEAD + 0.1 * AHEAD)
                told = (a.amax((0, 1)) < 0.9) & (truth > truth.max() * 1e-9)
                told[length:] = False
                assert told.sum() > length // 2
                torch.testing.assert_close(scores[layer, head][told].double(), truth[told], rtol=2e-3, atol=0)


@pytest.mark.usefixtures("endless")
def test_the_direct_readout_has_the_same_weights() -> None:
    engine = engine_of("llama", **GUESSING, readout="direct")
    with guessing(engine, MORE[:5]) as (sequence, weights):
        statistics = engine.statistics.collect(sequence, 10 + len(weights), engine.trace, weights)
    assert statistics.readout is not None
    shift = torch.randn(statistics.topk_p.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    p = statistics.topk_p.double()
    kl = torch.logsumexp(p.log() + shift, -1) - (p * shift).sum(-1)
    mean = (kl[: 10 + AHEAD].sum() + 0.1 * kl[10 + AHEAD :].sum()) / (10 + AHEAD + 0.1 * AHEAD)
    assert float(statistics.readout.divergence.of(shift)) == pytest.approx(float(mean), rel=1e-4)


# When something goes wrong


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
    honest = Bpkv.score

    def broken(self: Bpkv, *args: Any) -> Tensor:
        scores = honest(self, *args)
        scores[1, 0, 20] = value
        return scores

    monkeypatch.setattr(Bpkv, "score", broken)
    engine = engine_of("llama", **OPTIONS)
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    snapshot = Snapshot(engine.pool)
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None and event.note == "not compacted: 1 scores are NaN or Inf"
    assert event.entries_after == event.entries_before and engine.host.tokens[sequence] == PROMPT
    snapshot.assert_unchanged()


def test_without_room_for_a_draft_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", rows=52 + 16, caches=1, **OPTIONS)  # 70 are needed
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    snapshot = Snapshot(engine.pool)
    with monkeypatch.context() as patch:
        patch.setattr(engine.host.model, "forward", None)
        with pytest.raises(PoolExhausted, match=f"cannot hold {AHEAD} more tokens"):
            engine.compactor.on_context_step_end(sequence)
    snapshot.assert_unchanged()
    assert engine.host.tokens[sequence] == PROMPT


@pytest.mark.usefixtures("endless")
def test_without_room_for_a_second_draft_the_first_is_gone_too() -> None:
    """Deferred, and the answer took another turn: 73 rows are there for the new draft, 93 are needed for both."""
    engine = engine_of("llama", rows=76, caches=1, **{**OPTIONS, "regime": "deferred", "defer": 3})
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    snapshot = Snapshot(engine.pool)
    assert engine.compactor.on_context_step_end(sequence) is None
    snapshot.assert_unchanged()  # what was drafted at the end of the prompt is gone
    for token in MORE[:2]:
        engine.decode([(sequence, [token])])
        assert engine.compactor.on_generation_step_end(sequence) is None
    engine.decode([(sequence, MORE[2:3])])
    snapshot = Snapshot(engine.pool)
    with pytest.raises(PoolExhausted, match=f"cannot hold {AHEAD} more tokens"):
        engine.compactor.on_generation_step_end(sequence)
    snapshot.assert_unchanged()
    assert engine.host.tokens[sequence] == [*PROMPT, *MORE[:3]]


# Requests


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


def generator_with(pages: int, **options: Any) -> Generator:
    """A pool of exactly so many pages per head."""
    return Generator(engine_of("llama", rows=pages * options["page_size"], caches=1, **{**OPTIONS, **options}))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("new", [3, 6, 40])
@pytest.mark.usefixtures("endless")
def test_a_pool_with_just_enough_pages_works_and_a_smaller_one_refuses_at_once(
    regime: str, page_size: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer shorter and longer than the draft, which needs room of its own."""
    options, sampling = {"regime": regime, "defer": 3, "page_size": page_size}, SamplingParams(max_new_tokens=new)
    ahead = 2 * AHEAD if regime == "deferred" else AHEAD  # the draft at the end of the prompt may not have come true
    enough = -(-(len(PROMPT) + new) // page_size) + -(-ahead // page_size)
    generator = generator_with(enough, **options)
    (request,) = generator.generate([generator.add([PROMPT], sampling)])
    assert request.finished == "length" and len(request.generated) == new
    if regime == "prefill" or new > 3:
        assert request.events[0].drafted == AHEAD and request.events[0].note is None  # greedy: it has come true
    assert generator.engine.pool.live_pages == 0
    monkeypatch.setattr(TorchHost, "forward", None)
    smaller = generator_with(enough - 1, **options)
    with pytest.raises(PoolExhausted, match=f"need {enough * 4} pages, and the pool has {enough * 4 - 4} in all"):
        smaller.add([PROMPT], sampling)
    assert not smaller.waiting and smaller.engine.pool.live_pages == 0


@pytest.mark.usefixtures("endless")
def test_requests_of_a_batch_draft_in_turn_in_the_same_scratch_pages() -> None:
    generator = generator_with(2 * -(-(len(PROMPT) + 3) // 4) + -(-AHEAD // 4), page_size=4)
    requests = [generator.add([PROMPT], SamplingParams(max_new_tokens=3)) for _ in range(2)]
    assert generator.step() == requests, "both are admitted at once"
    generator.generate(requests)
    assert [request.events[0].drafted for request in requests] == [AHEAD, AHEAD]
    assert requests[0].generated == requests[1].generated


@pytest.mark.parametrize("name", TRAINED)
def test_the_default_looks_32_tokens_ahead_for_bpkv_alone(name: str) -> None:
    for options, ahead in (
        ({}, 32),
        ({"policy": "snapkv"}, 0),
        ({"policy": "snapkv", "lookahead": 16}, 16),
        ({"preset": "paper"}, 0),
        ({"policy": "tova"}, 0),
    ):
        config = BpkvConfig(regime="prefill", rehearsal=0, **options)
        engine = Engine(loaded(name), config, make_pool(loaded(name), 300, 32, scratch=ahead))
        sequence, event = compacted(engine, prompt_tokens(name, 1, 150))
        assert (event.drafted > 0) == (ahead > 0) and event.drafted <= ahead
        assert engine.scratch_pages([150]) == engine.pool.pages_for(ahead)


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.usefixtures("endless")
def test_drafted_tokens_have_no_say_in_what_a_head_keeps_by_its_latest_attention(name: str, scope: str) -> None:
    """The highest of SnapKV's scores of the sequence without a draft stay in every head, up to its share."""
    engine = engine_of(name, **OPTIONS, scope=scope, safeguard=0.8)
    config, traits, sequence = engine.compactor.config, wrapped(name).traits, engine.open()
    engine.encode([(sequence, PROMPT)])
    plain = engine.statistics.collect(sequence, config.positions, engine.trace)
    scores = SnapKv(config, traits).score(plain, engine.pool.view(sequence))
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None and event.drafted == AHEAD
    even, eligible = int(0.4 * len(PROMPT)), range(config.sinks, len(PROMPT) - config.recent)
    for layer, head in itertools.product(traits.compactable_layers, range(traits.kv_heads)):
        count = int(0.8 * even) - config.protected
        best = sorted(eligible, key=lambda row: float(-scores[layer, head, row]))[:count]  # noqa: B023 (used at once)
        assert count > 0 and set(best) <= set(engine.pool.positions(sequence, layer, head).tolist())
