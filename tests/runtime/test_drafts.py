"""What is drafted: the model's own greedy continuation, up to where the answer ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.runtime.engine import Engine, make_pool
from tests.runtime.conftest import TRAINED, MakeEngine, loaded, prompt_tokens
from tests.runtime.drafts import AHEAD, MORE, OPTIONS, PROMPT, REGIMES, compacted, greedy
from tests.runtime.random_models import COMPACTABLE, engine_of, random_tokens, wrapped
from tests.runtime.trail import follow


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
