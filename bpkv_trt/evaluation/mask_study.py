"""Does a method's score of a mask tell what evicting it costs? The published Figure 1, on masks of one size.

Many random masks are drawn; for each, the truth is the mean future KL with its entries evicted, and every contender
says what it thinks of it: the divergence of the whole mask where its policy has a readout, else the sum of its scores.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.budget import resolve
from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.evidence import mask_divergence
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.evaluation.arm import Arm
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.masks import MaskKind, at_random, in_blocks, masks_of
from bpkv_trt.evaluation.metrics import gap_between
from bpkv_trt.evaluation.reference import Reference
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.policies.registry import policy_class
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.step import Chunk

KINDS = {"blocks": in_blocks, "random": at_random}


@dataclass(frozen=True)
class _Moment:
    """When masks are evicted, and how much of the cache stays."""

    regime: str
    budget: str
    decoded: int  # tokens of the answer that come before

    @classmethod
    def of(cls, arm: Arm) -> "_Moment | None":
        """None where the arm scores no prompt."""
        regimes = arm.config.regime
        if policy_class(arm.config.policy).evicts_nothing or regimes == ("generation",):
            return None
        return cls(arm.regime, arm.budget, arm.config.defer if "deferred" in regimes else 0)


def study_masks(loaded: LoadedModel, comparison: Comparison, reference: Reference, seed: int) -> list[dict[str, Any]]:
    """For every moment and kind of mask: the truth of each mask, and what every contender makes of it."""
    moments: dict[_Moment, list[Arm]] = {}
    for arm in comparison.arms if len(reference.log_probs) else ():
        if (moment := _Moment.of(arm)) is not None:
            moments.setdefault(moment, []).append(arm)
    return [
        {"regime": moment.regime, "budget": moment.budget, "defer": moment.decoded, "kind": kind, **points}
        for moment, arms in moments.items()
        for kind, points in _study(loaded, comparison, reference, moment, arms, seed)
    ]


def _study(
    loaded: LoadedModel,
    comparison: Comparison,
    reference: Reference,
    moment: _Moment,
    arms: Sequence[Arm],
    seed: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    before, after = _split_at(reference, moment)
    tokens = reference.engine.pool.logical_length(reference.sequence) + len(before)
    count, common = _evicted(loaded, arms[0], reference.engine, tokens), comparison.common

    def drawing(kind: MaskKind) -> Callable[[], Iterator[Tensor]]:
        return lambda: masks_of(
            kind, loaded.traits, tokens, comparison.masks, seed, sinks=common.sinks, recent=common.recent
        )

    masks = {name: drawing(kind(count)) for name, kind in KINDS.items()}
    scores = {arm.contender: _scores(loaded, arm.seeded(seed), reference, before, masks) for arm in arms}
    for name, truth in _truths(reference, before, after, masks).items():
        yield name, {"truth": truth, "scores": {label: each[name] for label, each in scores.items()}}


def _split_at(reference: Reference, moment: _Moment) -> tuple[list[int], list[int]]:
    """What is run before the masks are evicted, and what after, up to the last token that is measured."""
    sample = reference.sample
    given = [token for part in (*sample.turns[1:], sample.lead) for token in part]
    return given[: moment.decoded], [*given[moment.decoded :], *reference.continuation[:-1]]


def _evicted(loaded: LoadedModel, arm: Arm, engine: Engine, tokens: int) -> int:
    """As many entries as the budget makes a compaction give up."""
    traits = loaded.traits
    budget = resolve(
        arm.config.budget,
        tokens=tokens,
        layers=len(traits.compactable_layers),
        kv_heads=traits.kv_heads,
        head_dim=traits.head_dim,
        itemsize=engine.pool.itemsize,
        protected=arm.config.protected,
    )
    return len(traits.compactable_layers) * traits.kv_heads * tokens - budget.total


def _scores(
    loaded: LoadedModel,
    config: BpkvConfig,
    reference: Reference,
    before: Sequence[int],
    masks: dict[str, Callable[[], Iterator[Tensor]]],
) -> dict[str, list[float | None]]:
    """By kind of mask, what one contender makes of each; the masks are not held, but drawn again."""
    engine = Engine(loaded, config, reference.engine.pool, memory=reference.memory)
    sequence = engine.adopt(reference.engine, reference.sequence)
    try:
        engine.statistics.prompt_ended(sequence)
        if before and config.lookahead:
            engine.statistics.draft_answer(sequence, config.lookahead, engine.trace)
        if before:
            engine.host.forward([engine.chunk(sequence, before)])
        with engine.statistics.look_ahead(sequence, config.lookahead, engine.trace) as drafted:
            judge, beyond = _judge(engine, sequence, drafted), (0, len(drafted))
            return {name: _rounded([judge(F.pad(mask, beyond)) for mask in draw()]) for name, draw in masks.items()}
    finally:
        engine.close(sequence)


def _judge(engine: Engine, sequence: int, drafted: Sequence[float]) -> Callable[[Tensor], float]:
    view, policy = engine.pool.view(sequence), engine.compactor.policy
    positions = engine.compactor.config.scoring_positions + len(drafted)
    statistics = engine.statistics.collect(sequence, positions, engine.trace, drafted)
    if statistics.readout is None:
        scores = policy.score(statistics, view).double()
        return lambda mask: float(scores[mask.to(scores.device)].sum())
    divergence = statistics.readout.divergence
    held = replace(statistics, readout=_Held(divergence, tuple(statistics.readout)))
    source = EvidenceSource(held, view, engine.host.traits)
    return lambda mask: mask_divergence(source, divergence, mask.to(engine.pool.device))


@dataclass(frozen=True)
class _Held:
    """A readout whose rows are kept, since every mask reads all of them."""

    divergence: Divergence
    rows: tuple[tuple[int, Tensor], ...]

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return iter(self.rows)


def _truths(
    reference: Reference, before: Sequence[int], after: Sequence[int], masks: dict[str, Callable[[], Iterator[Tensor]]]
) -> dict[str, list[float | None]]:
    """By kind of mask, the mean future KL with its entries evicted; nothing observes these runs."""
    host = reference.engine.host
    start = host.fork(reference.sequence)
    try:
        if before:
            host.forward([Chunk(start, before)])
        return {
            name: _rounded([_future_kl(reference, start, after, mask) for mask in draw()])
            for name, draw in masks.items()
        }
    finally:
        host.release(start)


def _future_kl(reference: Reference, start: int, after: Sequence[int], mask: Tensor) -> float:
    host, pool = reference.engine.host, reference.engine.pool
    copy = host.fork(start)
    try:
        pool.apply(CompactionPlan.from_eviction(pool.view(copy), mask.to(pool.device)))
        logits = host.forward([Chunk(copy, after)], every_token=True)
    finally:
        host.release(copy)
    return fmean(gap_between(reference.log_probs, logits[-len(reference.log_probs) :]).kl)


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
