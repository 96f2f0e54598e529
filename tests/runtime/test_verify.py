"""What `verify` reports, against two engines that are fed the same tokens one after the other."""

import pytest
import torch

from bpkv_trt.evaluation.verify import Verification, verify
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.torch_host import TorchHost
from tests.runtime.random_models import engine_of, random_tokens

PROMPT, QUESTION, NEW = random_tokens(1, 50), random_tokens(2, 9), 20


def teacher_forced(engine: Engine, turns: list[list[int]], answer: list[int] | None) -> tuple[list[torch.Tensor], int]:
    """Logits of every prediction, float64, and how many came before the first compaction; None: greedy."""
    sequence, predictions = engine.open(), list[torch.Tensor]()
    before: int | None = None
    for turn in turns:
        predictions.append(engine.encode([(sequence, turn)])[0].double())
        event = engine.compactor.on_context_step_end(sequence)
        before = len(predictions) if event is not None and before is None else before
    del predictions[: len(turns) - 1]  # what a turn ends with is followed by the next one, not by an answer
    before = None if before is None else before - len(turns) + 1
    for step in range(NEW - 1):
        token = int(predictions[-1].argmax()) if answer is None else answer[step]
        predictions.append(engine.decode([(sequence, [token])])[0].double())
        event = engine.compactor.on_generation_step_end(sequence)
        before = len(predictions) if event is not None and before is None else before
    engine.close(sequence)
    return predictions, before or 0


def expected(name: str, turns: list[list[int]], **options: object) -> Verification:
    full, _ = teacher_forced(engine_of(name, policy="full", regime="prefill"), turns, None)
    answer = [int(logits.argmax()) for logits in full]
    compacted, before = teacher_forced(engine_of(name, **options), turns, answer)
    pairs = list(zip(full, compacted, strict=True))[before:]
    kls = [float(torch.softmax(p, -1) @ (p.log_softmax(-1) - q.log_softmax(-1))) for p, q in pairs]
    same = sum(int(p.argmax()) == int(q.argmax()) for p, q in pairs)
    return Verification(sum(kls) / len(kls), max(kls), same / len(kls), len(kls))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "options",
    [
        {"regime": "prefill"},
        {"regime": "deferred", "defer": 4},
        {"regime": "prefill,generation"},
        {"regime": "generation", "interval": 8, "recent": 4, "positions": 4, "generation_budget": "4t"},
        {"regime": "prefill", "policy": "h2o", "scope": "head"},
    ],
    ids=str,
)
@pytest.mark.parametrize("turns", [[PROMPT], [PROMPT, QUESTION]], ids=["one_turn", "two_turns"])
def test_it_is_the_kl_of_the_two_engines_on_the_same_tokens(
    name: str, options: dict[str, object], turns: list[list[int]]
) -> None:
    engine = engine_of(name, budget="0.4", **options)
    ours, truth = verify(engine, turns, frozenset(), NEW), expected(name, turns, budget="0.4", **options)
    assert ours.tokens == truth.tokens and ours.top1_agreement == truth.top1_agreement
    assert ours.future_kl_mean == pytest.approx(truth.future_kl_mean, rel=1e-3)
    assert ours.future_kl_max == pytest.approx(truth.future_kl_max, rel=1e-3)
    assert ours.future_kl_mean is not None and ours.future_kl_mean > 1e-9, "far above what rounding gives (1e-13)"
    assert_empty(engine)


def assert_empty(engine: Engine) -> None:
    engine.pool.check_integrity()
    assert engine.pool.live_pages == 0 and engine.pool.sequences == ()
    assert engine.host.tokens == {} and engine.compactor.requests == {} and engine.statistics.received == {}


@pytest.mark.parametrize("turns", [[PROMPT], [PROMPT, QUESTION]], ids=["one_turn", "two_turns"])
def test_a_budget_of_all_changes_nothing(turns: list[list[int]]) -> None:
    checked = verify(engine_of("llama", budget="1.0", regime="prefill"), turns, frozenset(), NEW)
    assert checked == Verification(pytest.approx(0, abs=1e-10), pytest.approx(0, abs=1e-10), 1.0, NEW - 2 + len(turns))


@pytest.mark.parametrize("defer", [1, 4, 6])
def test_tokens_before_a_deferred_compaction_do_not_count(defer: int) -> None:
    engine = engine_of("llama", budget="0.4", regime="deferred", defer=defer)
    assert verify(engine, [PROMPT], frozenset(), NEW).tokens == NEW - 1 - defer


@pytest.mark.parametrize("defer", [1, 5])
def test_where_no_prediction_follows_the_compaction_there_is_nothing_to_report(defer: int) -> None:
    engine = engine_of("llama", budget="0.4", regime="deferred", defer=defer)
    assert verify(engine, [PROMPT], frozenset(), defer + 1) == Verification(None, None, None, 0)
    assert_empty(engine)


def test_it_ends_with_the_answer() -> None:
    full, _ = teacher_forced(engine_of("llama", policy="full"), [PROMPT], None)
    answer = [int(logits.argmax()) for logits in full]
    stop = answer[-5]
    engine = engine_of("llama", budget="0.4", regime="prefill")
    assert verify(engine, [PROMPT], frozenset({stop}), NEW).tokens == answer.index(stop)


@pytest.mark.parametrize("call", [0, 1, 4])
def test_a_failure_leaves_no_page_behind(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls, forward = engine_of("llama", budget="0.4", policy="h2o"), iter(range(NEW)), TorchHost.forward

    def fail(host: TorchHost, chunks: list) -> torch.Tensor:  # type: ignore[type-arg]
        if next(calls) == call:
            raise MemoryError
        return forward(host, chunks)

    monkeypatch.setattr(TorchHost, "forward", fail)
    with pytest.raises(MemoryError):
        verify(engine, [PROMPT], frozenset(), NEW)
    assert_empty(engine)
