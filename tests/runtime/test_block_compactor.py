"""The same decisions on the pool of a TensorRT-LLM session as on our own, where every head keeps as many rows."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy
from bpkv_trt.runtime.compactor import Compactor
from bpkv_trt.runtime.event import CompactionEvent
from tests.pool.stock_session import StockSession
from tests.runtime.random_models import engine_of, random_tokens

STEPS, TOKENS = 18, 4
SHARED, APART = [(0, 0), (0, 1)], [(0, 0), (1, 0)]
OPTIONS: dict[str, Any] = {"scope": "head", "regime": "prefill,generation", "budget": "0.4"}
OPTIONS |= {"lookahead": 0, "rehearsal": 0}


class SameStatistics:
    """What the torch host tells of a sequence; its own compactor tells it what was evicted."""

    def __init__(self, source: Any) -> None:
        self.source, self.offers = source, source.offers

    def prompt_ended(self, sequence: int) -> None: ...

    def compacted(self, sequence: int, plan: object) -> None: ...

    def rehearse(self, *given: Any) -> Any:
        return self.source.rehearse(*given)

    def look_ahead(self, *given: Any) -> AbstractContextManager[Sequence[float]]:
        return self.source.look_ahead(*given)

    def collect(self, *given: Any) -> ForwardStatistics:
        return self.source.collect(*given)


@pytest.mark.parametrize(
    ("policy", "mapping", "options"),
    [
        ("bpkv", SHARED, {"readout": "direct"}),
        ("bpkv", APART, {"readout": "exact"}),
        ("snapkv", SHARED, {}),
        ("h2o", SHARED, {}),
        ("rkv", APART, {}),
        ("pyramidkv", APART, {"regime": "prefill", "budget": "0.6"}),
    ],
)
def test_the_same_rows_stay(
    policy: str, mapping: list[tuple[int, int]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**OPTIONS, **options}
    if policy != "bpkv":
        given = {option: value for option, value in given.items() if option not in ("lookahead", "rehearsal")}
    engine = engine_of("llama", policy=policy, **given)
    traits, own = engine.host.traits, engine.compactor
    scores: list[Tensor] = []
    honest = type(own.policy).score

    def noted(self: Policy, *args: Any) -> Tensor:
        scores.append(honest(self, *args))
        return scores[-1]

    monkeypatch.setattr(type(own.policy), "score", noted)
    prompts = [random_tokens(1, 50), random_tokens(2, 37)]
    session = StockSession(
        [50, 37],
        STEPS,
        mapping,
        kv_heads=traits.kv_heads,
        head_dim=traits.head_dim,
        tokens_per_block=TOKENS,
        poison=True,
    )
    other = Compactor(own.config, own.policy, traits, session.pool, SameStatistics(engine.statistics))  # type: ignore[arg-type]
    sequences = [engine.open() for _ in prompts]
    assert sequences == list(session.pool.sequences)
    for sequence in sequences:
        other.on_request_init(sequence)
    engine.encode(list(zip(sequences, prompts, strict=True)))
    events: list[CompactionEvent] = []
    for step in range(STEPS + 1):
        if step:
            engine.decode([(sequence, random_tokens(100 * step + sequence, 1)) for sequence in sequences])
        for sequence in sequences:
            copy_new_rows(engine.pool, session, sequence)
        session.step()
        for sequence in sequences:
            hook = "on_generation_step_end" if step else "on_context_step_end"
            theirs, ours = (getattr(each, hook)(sequence) for each in (other, own))
            assert (theirs is None) == (ours is None)
            if ours is not None:
                assert (theirs.entries_after, theirs.estimated_kl) == (ours.entries_after, ours.estimated_kl)
                events.append(ours)
            assert_same_rows(engine.pool, session, sequence)
        session.pool.check_integrity()
        if policy == "pyramidkv":
            assert all(len(set(session.pool.lengths(sequence)[:, 0])) == traits.layers for sequence in sequences)
    evicted = [event for event in events if event.entries_after < event.entries_before]
    regimes = given["regime"].split(",")
    due = [(regime, step) for regime, step in (("prefill", 0), ("generation", 16)) if regime in regimes]
    assert [(event.regime, event.step) for event in evicted] == [each for each in due for _ in sequences]
    assert len(scores) == 2 * len(evicted)
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(scores[::2], scores[1::2], strict=True))


def copy_new_rows(pool: Any, session: StockSession, sequence: int) -> None:
    """What the engine's run would have written into its blocks."""
    count = pool.logical_length(sequence) - session.pool.logical_length(sequence)
    view, table, lengths = pool.view(sequence), session.table(), session.pool.lengths(sequence)
    for layer, heads in enumerate(lengths):
        rows = [[side(layer, head)[-count:] for head in range(len(heads))] for side in (view.keys, view.values)]
        session.write(table, sequence, layer, int(heads[0]), *map(torch.stack, rows))
    session.pool.extend(sequence, count)


def assert_same_rows(pool: Any, session: StockSession, sequence: int) -> None:
    ours, theirs = pool.view(sequence), session.pool.view(sequence)
    assert ours.lengths.tolist() == theirs.lengths.tolist()
    assert torch.equal(ours.position_table(), theirs.position_table())
    for layer in range(len(ours.lengths)):
        for head in range(len(ours.lengths[layer])):
            assert torch.equal(ours.keys(layer, head), theirs.keys(layer, head))
            assert torch.equal(ours.values(layer, head), theirs.values(layer, head))
