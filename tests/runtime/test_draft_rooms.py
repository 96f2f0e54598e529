"""The room that drafts need: just enough is enough, and with less nothing is run."""

from typing import Any

import pytest

from bpkv_trt.errors import PoolExhausted
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.torch_host import TorchHost
from tests.pool.snapshot import Snapshot
from tests.runtime.drafts import AHEAD, MORE, OPTIONS, PROMPT, REGIMES
from tests.runtime.random_models import engine_of


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
