"""Further drafts, from the next most probable tokens: which they are, what they weigh, and that nothing is left."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.evidence import EvidenceSource, score_entries
from bpkv_trt.errors import PoolExhausted
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.lookahead import look_ahead
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.torch_host import TorchHost
from tests.pool.snapshot import Snapshot
from tests.runtime.conftest import TRAINED, MakeEngine, loaded, prompt_tokens
from tests.runtime.masked_reference import MaskedReference
from tests.runtime.random_models import COMPACTABLE, engine_of, plain_copy, random_tokens, wrapped
from tests.runtime.test_lookahead import (
    AHEAD,
    MORE,
    OPTIONS,
    PROMPT,
    assert_masked,
    assert_near,
    compacted,
    endless,
    generator_with,
    greedy,
)
from tests.runtime.trail import follow

__all__ = ["endless"]  # a fixture

HALF = AHEAD // 2
GUESSING = {**OPTIONS, "alternatives": 2}
Drafted = tuple[list[int], tuple[float, ...]]


def nth_best(name: str, tokens: list[int], choice: int) -> int:
    """The next token that `choice` others exceed, by transformers."""
    logits = plain_copy(name)(torch.tensor([tokens])).logits[0, -1]
    return int(logits.argsort(descending=True)[choice])


def alternative(name: str, tokens: list[int], choice: int, count: int = HALF) -> list[int]:
    first = nth_best(name, tokens, choice)
    return [first, *greedy(name, [*tokens, first], count - 1)]


def drafted(engine: Engine, own: list[int], defer: int = 0) -> Drafted:
    """What follows `own`, whose last `defer` tokens are decoded, and its weights. Checks that nothing is left."""
    sequence, prompt = engine.open(), own[: len(own) - defer]
    engine.encode([(sequence, prompt)])
    if defer:
        engine.statistics.draft_answer(sequence, AHEAD, engine.trace)
        for token in own[len(prompt) :]:
            engine.decode([(sequence, [token])])
    snapshot = Snapshot(engine.pool)
    with engine.statistics.look_ahead(sequence, AHEAD, engine.trace) as weights:
        tokens = engine.host.tokens[sequence][len(own) :]
        assert engine.pool.logical_length(sequence) == len(own) + len(weights)
    snapshot.assert_unchanged()
    assert engine.host.tokens[sequence] == own
    return tokens, tuple(weights)


# Which they are


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("endless")
def test_each_begins_with_the_next_most_probable_token_of_the_sequence_itself(name: str, count: int) -> None:
    engine = engine_of(name, **{**OPTIONS, "alternatives": count})
    guesses = [token for choice in range(1, count + 1) for token in alternative(name, PROMPT, choice)]
    assert drafted(engine, PROMPT) == (greedy(name, PROMPT, AHEAD) + guesses, (1.0,) * AHEAD + (0.1,) * len(guesses))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("true", [False, True])
@pytest.mark.usefixtures("endless")
def test_they_come_after_an_earlier_draft(name: str, true: bool) -> None:
    """One that has come true is part of the first draft; another follows it, and weighs as little as they do."""
    own = [*PROMPT, *(greedy(name, PROMPT, 5) if true else MORE[:5])]
    guesses = [] if true else greedy(name, PROMPT, AHEAD)
    for choice in (1, 2):
        guesses += alternative(name, own, choice)
    tokens, weights = drafted(engine_of(name, **{**GUESSING, "regime": "deferred", "defer": 5}), own, 5)
    assert tokens == greedy(name, own, AHEAD) + guesses
    assert weights == (1.0,) * AHEAD + (0.1,) * len(guesses)


@pytest.mark.usefixtures("endless")
def test_a_stop_token_leaves_an_alternative_empty_or_short(monkeypatch: pytest.MonkeyPatch) -> None:
    main, second, third = greedy("llama", PROMPT, AHEAD), *(alternative("llama", PROMPT, choice) for choice in (1, 2))
    late = next(token for token in third[1:] if token not in (*main, second[0], third[0]))
    monkeypatch.setattr(wrapped("llama", torch.float32).model.generation_config, "eos_token_id", [second[0], late])
    assert second[0] not in main and second[0] not in third[: third.index(late)]
    tokens, weights = drafted(engine_of("llama", **GUESSING), PROMPT)
    assert tokens == main + third[: third.index(late)] and len(tokens) < AHEAD + HALF
    assert weights == (1.0,) * AHEAD + (0.1,) * (len(tokens) - AHEAD)


@pytest.mark.usefixtures("endless")
def test_where_the_answer_is_over_only_they_lie_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most probable next token ends the answer."""
    first, guess = nth_best("llama", PROMPT, 0), alternative("llama", PROMPT, 1)
    monkeypatch.setattr(wrapped("llama", torch.float32).model.generation_config, "eos_token_id", first)
    guess = guess[: guess.index(first)] if first in guess else guess
    engine = engine_of("llama", **{**OPTIONS, "alternatives": 1})
    assert drafted(engine, PROMPT) == (guess, (0.1,) * len(guess))
    _, event = compacted(engine, PROMPT)
    assert event.drafted == len(guess) and event.note is None and event.entries_after < event.entries_before


@pytest.mark.usefixtures("endless")
def test_equal_logits_go_by_the_lower_token() -> None:
    """As in decoding; logits of a half type are often equal, and no alternative is another one, or the first draft."""
    engine = engine_of("llama", **GUESSING)
    handle = engine.host.model.lm_head.register_forward_hook(lambda module, args, output: output * 0)
    try:
        tokens, _ = drafted(engine, PROMPT)
    finally:
        handle.remove()
    assert tokens == [0] * AHEAD + [1] + [0] * (HALF - 1) + [2] + [0] * (HALF - 1)


@pytest.mark.parametrize("options", [{"lookahead": 0}, {"lookahead": 1}, {"regime": "generation"}])
@pytest.mark.usefixtures("endless")
def test_none_without_a_lookahead_of_two(options: dict[str, object]) -> None:
    (trail,) = follow(engine_of("llama", **{**GUESSING, **options}), [PROMPT], [random_tokens(2, 9)])
    ahead = 1 if options == {"lookahead": 1} else 0
    assert trail.events and [event.drafted for event in trail.events] == [ahead] * len(trail.events)


# What they weigh


@contextmanager
def looking(engine: Engine, prompt: list[int]) -> Iterator[tuple[int, tuple[float, ...]]]:
    sequence = engine.open()
    engine.encode([(sequence, prompt)])
    with engine.statistics.look_ahead(sequence, AHEAD, engine.trace) as weights:
        yield sequence, tuple(weights)


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.usefixtures("endless")
def test_exact_scores_are_the_weighted_mean_of_those_of_each_position(name: str) -> None:
    """1/2 (dz . xi)^2 for dz . xi = a / (1 - a) (c - v) . row, position by position in float64; weights 1 and 0.1."""
    engine, traits = engine_of(name, **GUESSING, readout="exact", probes=2), wrapped(name).traits
    own = engine.compactor.config.positions
    with looking(engine, PROMPT) as (sequence, weights):
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
                told[len(PROMPT) :] = False
                assert told.sum() > len(PROMPT) // 2
                torch.testing.assert_close(scores[layer, head][told].double(), truth[told], rtol=2e-3, atol=0)


@pytest.mark.usefixtures("endless")
def test_the_direct_readout_has_the_same_weights() -> None:
    engine = engine_of("llama", **GUESSING, readout="direct")
    with looking(engine, PROMPT) as (sequence, weights):
        statistics = engine.statistics.collect(sequence, 5 + len(weights), engine.trace, weights)
    assert statistics.readout is not None
    shift = torch.randn(statistics.topk_p.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    p = statistics.topk_p.double()
    kl = torch.logsumexp(p.log() + shift, -1) - (p * shift).sum(-1)
    mean = (kl[: 5 + AHEAD].sum() + 0.1 * kl[5 + AHEAD :].sum()) / (5 + AHEAD + 0.1 * AHEAD)
    assert float(statistics.readout.divergence.of(shift)) == pytest.approx(float(mean), rel=1e-4)


# As if nothing had been drafted


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("regime", ["prefill", "deferred"])
@pytest.mark.usefixtures("endless")
def test_evicted_is_masked(name: str, regime: str) -> None:
    """L2, with pages of one row, past a window shorter than what is drafted."""
    options = {**GUESSING, "regime": f"{regime},generation", "defer": 5, "page_size": 1}
    trails = follow(engine_of(name, **options), [PROMPT, random_tokens(3, 41)], [MORE, random_tokens(4, 9)])
    for trail in trails:
        assert (trail.events[0].drafted, trail.events[0].note) == ((3 if regime == "deferred" else 2) * AHEAD, None)
        assert len(trail.engine.host.tokens[trail.sequence]) == len(trail.tokens)
    assert_masked(name, trails)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("regime", ["prefill", "deferred"])
def test_a_trained_model_keeps_what_it_needs(make_engine: MakeEngine, name: str, regime: str) -> None:
    """L2; tiny-gemma's window is 32, shorter than the prompt and than what is drafted."""
    model = loaded(name)
    options = {"regime": regime, "defer": 4, "lookahead": 24, "alternatives": 3, "page_size": 1}
    engine = make_engine(name, budget="0.3", **options)
    (trail,) = follow(engine, [prompt_tokens(name, 1, 150)], [prompt_tokens(name, 2, 60)[1:40]])
    assert 24 < trail.events[0].drafted <= engine.compactor.config.drafted and trail.events[0].note is None
    assert trail.events[0].entries_after < trail.events[0].entries_before
    window = dict.fromkeys(model.traits.sliding_layers, model.traits.sliding_window or 0)
    truth = MaskedReference(copy.deepcopy(model.model), window).logits(trail.tokens, trail.hidden_from())
    for index, logits in trail.logits.items():
        assert float((logits - truth[index]).abs().max() / truth[index].abs().max()) < 1e-5


@pytest.mark.parametrize("regime", ["prefill", "deferred"])
def test_the_latest_attention_of_a_safeguard_is_the_sequences_own(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a share of 1 in scope head every row that stays is secured: the drafts have no say, whatever they are."""
    tables: list[Tensor] = []
    for alternatives in (0, 2):
        options = {**OPTIONS, "regime": regime, "defer": 5, "scope": "head", "safeguard": 1.0}
        engine = engine_of("llama", **{**options, "alternatives": alternatives})
        (trail,) = follow(engine, [PROMPT], [MORE[:5]])
        tables.append(engine.pool.view(trail.sequence).position_table())
    assert torch.equal(*tables)


# Room


@pytest.mark.parametrize("regime", ["prefill", "deferred"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.usefixtures("endless")
def test_a_pool_with_just_enough_pages_works_and_a_smaller_one_refuses_at_once(
    regime: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, sampling = {**GUESSING, "regime": regime, "defer": 3, "page_size": page_size}, SamplingParams(6)
    ahead = (3 if regime == "deferred" else 2) * AHEAD
    enough = -(-(len(PROMPT) + 6) // page_size) + -(-ahead // page_size)
    generator = generator_with(enough, **options)
    (request,) = generator.generate([generator.add([PROMPT], sampling)])
    assert request.finished == "length" and request.events[0].note is None
    assert request.events[0].drafted == 2 * AHEAD  # greedy: the draft at the end of the prompt has come true
    assert generator.engine.pool.live_pages == 0
    monkeypatch.setattr(TorchHost, "forward", None)
    smaller = generator_with(enough - 1, **options)
    with pytest.raises(PoolExhausted, match=f"need {enough * 4} pages, and the pool has {enough * 4 - 4} in all"):
        smaller.add([PROMPT], sampling)
    assert not smaller.waiting and smaller.engine.pool.live_pages == 0


@pytest.mark.parametrize("defer", [0, 5])
@pytest.mark.parametrize("missing", [0, 1, HALF, AHEAD + 1, 2 * AHEAD - 1])
@pytest.mark.usefixtures("endless")
def test_just_enough_rows_suffice_and_otherwise_all_is_as_it_was(defer: int, missing: int) -> None:
    """Whichever draft there is no room for; deferred, an earlier one that has not come true counts too."""
    own = [*PROMPT, *MORE[:defer]]
    options = {**GUESSING, "regime": "deferred" if defer else "prefill", "page_size": 1, "defer": max(defer, 1)}
    ahead = (3 if defer else 2) * AHEAD
    assert engine_of("llama", **options).compactor.config.drafted == ahead
    engine = engine_of("llama", rows=len(own) + ahead - missing, caches=1, **options)
    if missing == 0:
        assert len(drafted(engine, own, defer)[1]) == ahead and engine.pool.free_pages == ahead * 4
        return
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    if defer:
        engine.statistics.draft_answer(sequence, AHEAD, engine.trace)
        for token in MORE[:defer]:
            engine.decode([(sequence, [token])])
    snapshot = Snapshot(engine.pool)
    with pytest.raises(PoolExhausted), engine.statistics.look_ahead(sequence, AHEAD, engine.trace):
        pass
    snapshot.assert_unchanged()
    assert engine.host.tokens[sequence] == own


@pytest.mark.usefixtures("endless")
def test_a_fork_drafts_what_its_sequence_would() -> None:
    """What an evaluation does to run the same tokens over the full cache."""
    engine = engine_of("llama", rows=200, **GUESSING)
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    other = engine.host.fork(sequence)
    weights = look_ahead(engine.host, other, AHEAD, 2, frozenset())
    with engine.statistics.look_ahead(sequence, AHEAD, engine.trace) as ours:
        assert ours == weights and engine.host.tokens[sequence] == engine.host.tokens[other]
        assert_near(*(engine.host.replay(each, 4).logits for each in (sequence, other)))
    engine.host.release(other)
