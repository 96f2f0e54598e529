"""Requests of any configurations in one batch: each as if it ran alone, over a pool that never promises too much."""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor, nan

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.selection import Selection
from bpkv_trt.errors import ConfigError, InputError, NumericalError, PoolExhausted
from bpkv_trt.policies.bpkv import Bpkv
from bpkv_trt.runtime.compactor import Compactor
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost
from tests.runtime.random_models import model_with, wrapped
from tests.runtime.served import KINDS, Kind, Served, alone, kinds

GREEDY = SamplingParams(max_new_tokens=12)
SPOILT = 2  # a token whose prompts have scores that are NaN


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of sequences that begin with SPOILT are NaN."""
    choose = Compactor._choose

    def spoil(self: Compactor, sequence: int, *args: Any) -> Any:
        chosen = choose(self, sequence, *args)
        return 3 if self.source.host.tokens[sequence][0] == SPOILT else chosen  # type: ignore[attr-defined]

    monkeypatch.setattr(Compactor, "_choose", spoil)


class SpoiltKind(Kind):
    """One whose prompt cannot be scored."""

    @property
    def prompt(self) -> list[int]:
        return [SPOILT, *super().prompt[1:]]


@cache
def spoilt_kind(kind: Kind) -> SpoiltKind:
    return SpoiltKind(kind.options, kind.number, kind.tokens, kind.sampling)


@pytest.mark.parametrize(("name", "count"), [("llama", 300), ("gemma3", 60)])
def test_requests_come_and_go_and_answer_as_if_each_ran_alone(name: str, count: int) -> None:
    """Through a pool for less than two of the longest; every step is checked (`Served.step`)."""
    served, draw, asked, together = Served(name, rows=160), random.Random(1), kinds(name, 27), 0
    for _ in range(count):
        served.add(draw.choice(asked))
        if draw.random() < 0.1:
            served.remove(draw.choice(list(served.asked)))
        for _ in range(draw.choice((0, 0, 1, 2, 9))):
            served.step()
            together = max(together, len(served.batch.running))
    served.run()
    assert together >= 5
    assert len({tuple(alone(name, kind)) for kind in asked}) > 20


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, ends and steps, with prompts that cannot be compacted among them."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Served("llama", rows=168, chunk_tokens=7, most_running=5)

    @rule(number=st.integers(0, 26), spoilt=st.sampled_from((False, False, True)))
    def add(self, number: int, spoilt: bool) -> None:
        kind = kinds("llama", 27)[number]
        self.served.add(spoilt_kind(kind) if spoilt else kind)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.served.asked:
            self.served.remove(data.draw(st.sampled_from(list(self.served.asked))))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.served.step()

    @invariant()
    def the_pool_is_sound(self) -> None:
        self.served.pool.check_integrity()

    def teardown(self) -> None:
        self.served.run()


@pytest.mark.usefixtures("spoilt")
def test_a_machine_of_arrivals_ends_and_steps() -> None:
    quick = settings(max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=quick)


def most_decoding(served: Served, kind: dict[str, Any], tokens: int, answer: int, count: int) -> int:
    """The most requests past their prompts at once, of `count` that come together."""
    for number in range(count):
        served.add(Kind(kind, number, tokens, SamplingParams(answer)))
    most = 0
    while served.asked:
        for batched in served.batch.step():
            if batched.request.finished is not None:
                assert batched.error is None
                del served.asked[batched]
        most = max(most, sum(not batched.in_prompt for batched in served.batch.running))
    served.assert_empty()
    return most


def test_a_fifth_of_the_cache_holds_four_times_the_requests() -> None:
    """In a pool for eight full prompts and answers."""
    tokens, answer, model = 600, 14, model_with("llama", layers=2, max_position_embeddings=1024)
    small = {"budget": "0.2", "regime": "prefill", "scope": "head", "policy": "streaming_llm"}

    def most(kind: dict[str, Any]) -> int:
        served = Served("", rows=8 * 616, chunk_tokens=8 * tokens, most_running=64, model=model)
        return most_decoding(served, kind, tokens, answer, count=40)

    assert most({"policy": "full"}) == 8
    assert most(small) >= 32


def test_a_long_prompt_does_not_stall_who_decodes() -> None:
    served = Served("llama", rows=400, chunk_tokens=8)
    short = served.add(Kind({"policy": "full"}, 1, 5, SamplingParams(40)))
    served.step()
    long = served.add(Kind({"policy": "full"}, 2, 100, SamplingParams(2)))
    for step in range(13):  # 100 tokens in chunks of 8
        assert long.in_prompt and len(short.request.generated) == step + 1
        assert served.step() == [short, long]
    assert not long.in_prompt and len(long.request.generated) == 1
    served.run()


def test_chunks_of_a_prompt_end_where_they_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else is in the batch; together they have no more than chunk_tokens in a step."""
    served, seen = Served("llama", rows=400, chunk_tokens=10), list[list[tuple[int, int]]]()
    forward = TorchHost.forward

    def note(self: TorchHost, chunks: Sequence[Chunk], **options: bool) -> Tensor:
        seen.append([(chunk.sequence, len(chunk.tokens)) for chunk in chunks])
        return forward(self, chunks, **options)

    monkeypatch.setattr(TorchHost, "forward", note)
    for number, tokens in enumerate((23, 4, 12, 17)):
        served.add(Kind({"policy": "full"}, number, tokens, SamplingParams(2)))
    while any(batched.in_prompt for batched in (*served.batch.waiting, *served.batch.running)):
        served.batch.step()
        assert sum(count for _, count in seen[-1] if count > 1) <= 10
    parts = {
        sequence: [count for step in seen for each, count in step if each == sequence and count > 1]
        for sequence in range(4)
    }
    assert parts == {0: [10, 10, 3], 1: [4], 2: [10, 2], 3: [10, 7]}


def test_who_came_first_is_admitted_first() -> None:
    """A short one that would fit does not pass the long one before it, which it could keep waiting for ever."""
    served = Served("llama", rows=100, chunk_tokens=64)
    first = served.add(Kind({"policy": "full"}, 1, 60, SamplingParams(9)))
    second = served.add(Kind({"policy": "full"}, 2, 60, SamplingParams(9)))
    third = served.add(Kind({"policy": "full"}, 3, 3, SamplingParams(2)))
    while first.request.finished is None:
        served.step()
        assert list(served.batch.waiting) == [second, third]
    served.step()
    assert not served.batch.waiting
    served.run()


@pytest.mark.parametrize("budget", ["0.3", "1"])
def test_a_compaction_of_the_prompt_makes_room_at_once(budget: str) -> None:
    served = Served("llama", rows=100, chunk_tokens=64)
    kind = {"budget": budget, "policy": "streaming_llm", "regime": "prefill"}
    first = served.add(Kind(kind, 1, 60, SamplingParams(9)))
    second = served.add(Kind(kind, 2, 60, SamplingParams(9)))
    served.step()
    assert not first.in_prompt and second in served.batch.waiting
    served.step()
    assert (second in served.batch.running) == (budget == "0.3")
    served.run()


@pytest.mark.usefixtures("spoilt")
def test_a_prompt_that_cannot_be_compacted_waits_for_room_and_answers_as_alone() -> None:
    """Others were admitted counting on its compaction: it starts over, first of all, when it fits as it is."""
    served = Served("llama", rows=176, chunk_tokens=200)
    kind = {"budget": "0.3", "policy": "streaming_llm", "regime": "prefill"}
    others = [served.add(Kind(kind, number, 40, SamplingParams(20))) for number in (1, 2)]
    broken = served.add(SpoiltKind({"budget": "0.3", "regime": "prefill"}, 3, 50, SamplingParams(30)))
    others.append(served.add(Kind(kind, 4, 40, SamplingParams(20))))
    later = served.add(Kind(kind, 5, 40, SamplingParams(20)))
    served.step()
    while others[0].request.finished is None:
        assert list(served.batch.waiting) == [broken, later] and broken.request.events == [] == broken.request.generated
        served.step()
    while broken.request.finished is None:
        served.step()
    assert [event.broken_scores for event in broken.request.events] == [3]
    served.run()


@pytest.mark.usefixtures("spoilt")
def test_a_prompt_that_cannot_be_compacted_and_never_fits_is_an_error_of_its_own() -> None:
    served = Served("llama", rows=84, chunk_tokens=200)
    broken = served.add(SpoiltKind({"budget": "0.3", "policy": "streaming_llm"}, 3, 60, SamplingParams(30)))
    other = served.add(Kind({"policy": "full"}, 1, 20, GREEDY))
    while broken.error is None:
        served.batch.step()
    assert isinstance(broken.error, PoolExhausted) and broken.request.finished == "aborted"
    del served.asked[broken]
    served.run()
    assert other.request.finished is not None


def spoiling_logits(served: Served, sequence_of: Callable[[], int | None]) -> Any:
    """A hook that makes the logits of one sequence NaN, in whatever batch it runs."""
    forward = served.engines.host.forward

    def spoil(chunks: Sequence[Chunk], **options: bool) -> Tensor:
        logits = forward(chunks, **options)
        for row, chunk in enumerate(chunks):
            if chunk.sequence == sequence_of():
                logits[row] *= nan
        return logits

    return spoil


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_logits_that_are_nan_end_one_request_and_leave_the_others(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first chunk of a prompt, in a later one and while decoding."""
    served = Served("llama", rows=400, chunk_tokens=24)
    asked = [Kind(KINDS[number], number, 20, GREEDY) for number in range(4)]
    others = [served.add(kind) for kind in asked[:2]]
    broken = served.add(Kind({"budget": "0.4"}, 9, 30, GREEDY))
    others += [served.add(kind) for kind in asked[2:]]
    while broken.encoded == 0 if steps else False:
        served.step()
    for _ in range(steps - 1):
        served.step()
    hook = spoiling_logits(served, lambda: broken.request.sequence)
    monkeypatch.setattr(served.engines.host, "forward", hook)
    while broken.error is None:
        before = len(broken.request.generated)
        served.batch.step()
    assert isinstance(broken.error, NumericalError) and len(broken.request.generated) == before
    assert not served.batch.failed
    served.asked = {batched: kind for batched, kind in served.asked.items() if batched in served.batch.running}
    served.run()


class Broken(Exception):
    """What a layer might raise."""


def test_a_forward_pass_that_fails_ends_those_in_it_and_no_others() -> None:
    served = Served("llama", rows=400, chunk_tokens=10)
    first = served.add(Kind({"policy": "full"}, 1, 10, GREEDY))
    second = served.add(Kind({"policy": "h2o"}, 2, 10, GREEDY))  # opened, but its chunk does not fit beside

    def fail(*_: object) -> None:
        raise Broken

    handle = served.engines.host.model.model.layers[1].register_forward_hook(fail)
    served.batch.step()
    handle.remove()
    assert served.batch.failed and isinstance(first.error, Broken) and second.error is None
    del served.asked[first]
    served.step()
    assert not served.batch.failed
    served.run()


@pytest.mark.parametrize("fails", ["admit", "open", "on_request_init"])
def test_a_request_that_cannot_be_opened_ends_alone(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Whatever its opening came to: nothing of it is left, and those behind it are admitted in the same step."""
    served = Served("llama", rows=400, chunk_tokens=100)
    broken = served.add(Kind({"policy": "h2o"}, 1, 10, GREEDY))
    others = [served.add(Kind(options, 2, 10, GREEDY)) for options in ({"policy": "h2o"}, {"policy": "full"})]
    owner = {"admit": served.pool, "open": broken.engine.statistics, "on_request_init": broken.engine.compactor}[fails]
    honest, calls = getattr(owner, fails), itertools.count()

    def fail_once(*given: Any) -> Any:
        if next(calls) == 0:
            raise MemoryError
        return honest(*given)

    monkeypatch.setattr(owner, fails, fail_once)
    assert served.batch.step() == [broken, *others]
    assert isinstance(broken.error, MemoryError) and broken.finished == "aborted" and not served.batch.failed
    assert len(served.pool.sequences) == len(served.batch.running) == 2
    del served.asked[broken]
    served.run()


def test_an_error_in_a_compaction_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("llama", rows=400, chunk_tokens=100)
    broken = served.add(Kind({"budget": "0.3"}, 1, 40, GREEDY))
    other = served.add(Kind({"policy": "streaming_llm", "budget": "0.3"}, 2, 40, GREEDY))

    def fail(*_: object) -> Selection:
        raise Broken

    monkeypatch.setattr(Bpkv, "select", fail)
    served.batch.step()
    assert isinstance(broken.error, Broken) and len(other.request.generated) == 1
    del served.asked[broken]
    served.run()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("steps", [0, 2, 5, 9, 18])
def test_a_request_can_be_removed_at_every_stage_and_again(kind: dict[str, Any], steps: int) -> None:
    """Queued, in its prompt, just compacted, decoding, after a compaction of the answer."""
    served = Served("llama", rows=200, chunk_tokens=8)
    doomed = served.add(Kind(kind, 1, 40, SamplingParams(25)))
    served.add(Kind({"budget": "0.4"}, 2, 30, SamplingParams(15)))
    for _ in range(steps):
        served.step()
    for _ in range(2):
        served.remove(doomed)
        served.pool.check_integrity()
    assert doomed.request.finished == "aborted" and doomed.request.sequence is None
    served.run()


def test_what_can_never_be_served_is_refused_at_once() -> None:
    served = Served("llama", rows=40)
    known = wrapped("llama").traits.max_positions
    refused: tuple[tuple[Kind, type[Exception], str], ...] = (
        (Kind({"policy": "full"}, 1, 0, GREEDY), InputError, "no tokens"),
        (Kind({"policy": "full"}, 1, known, GREEDY), InputError, f"knows {known} positions"),
        (Kind({"budget": "10kB"}, 1, 39, GREEDY), PoolExhausted, "in all"),
        (Kind({"budget": "300B"}, 1, 39, GREEDY), ConfigError, "budget"),
        (Kind({"budget": "1kB"}, 1, 30, GREEDY), ConfigError, "protected"),
        (Kind({"page_size": 8}, 1, 9, GREEDY), ConfigError, "pages of one size"),
        (Kind({"layer_table": "/etc/passwd"}, 1, 9, GREEDY), ConfigError, "file of the server"),
        (Kind({"polcy": "h2o"}, 1, 9, GREEDY), ConfigError, "did you mean policy"),
        (Kind({"policy": "h2o", "probes": 2}, 1, 9, GREEDY), ConfigError, "no such part"),
        (Kind({"regime": "prefill", "interval": 9}, 1, 9, GREEDY), ConfigError, "changes nothing"),
    )
    for kind, error, words in refused:
        with pytest.raises(error, match=words):
            served.prepare(kind)
    served.assert_empty()


def test_requests_of_equal_configurations_share_an_engine_that_goes_with_them() -> None:
    served = Served("llama", rows=200)
    first, second, other = (
        served.add(Kind(options, 1, 9, GREEDY)) for options in ({"budget": "0.3"}, {"budget": "0.3"}, {"budget": "0.4"})
    )
    assert first.engine is second.engine and first.engine is not other.engine
    assert first.engine.host is other.engine.host
    served.run()
    del first, second, other
    assert len(served.engines._in_use) == 1


def test_what_the_server_set_for_its_policy_is_not_meant_for_another() -> None:
    served = Served("llama", rows=200)
    config = served.engines.configured({"policy": "h2o"})
    assert config.refine == BpkvConfig().refine and config.lookahead == 0 and config.sinks == 2
    assert served.engines.configured({"policy": "bpkv"}).refine == 4
    assert served.engines.configured({"regime": "generation"}).drafted == 0
