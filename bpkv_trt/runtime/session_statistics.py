"""Forward statistics of a TensorRT-LLM session: what the engine told of scoring positions while they passed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.core.divergence import position_weights
from bpkv_trt.core.readout import BranchWeights, DirectReadout
from bpkv_trt.core.rehearsal import Rehearsal
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.policies.base import Requirement
from bpkv_trt.pool.block_pool import BlockPool
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.profiling import Trace

Outputs = Mapping[str, Tensor]  # of one run, by the engine's names


@dataclass
class _Window:
    """The positions of one sequence that have been scored since its last compaction; every list by run."""

    scores: Tensor  # [L, Hkv, T] fp32, summed over the positions
    q: list[Tensor] = field(default_factory=list)  # [L, m, Hq, D]
    context: list[Tensor] = field(default_factory=list)  # [L, m, Hq, D]
    residual: list[Tensor] = field(default_factory=list)  # [m, d]
    ids: list[Tensor] = field(default_factory=list)  # [m, K]
    p: list[Tensor] = field(default_factory=list)  # [m, K]
    covered: list[Tensor] = field(default_factory=list)  # [m]
    final: list[Tensor] = field(default_factory=list)  # [m, K, d]


class SessionStatistics:
    """The engine scores every position once, in the run of its token; a window of them is what a compaction goes by.

    What the window takes is a small part of the cache: for each position K d numbers, and for each entry one.
    """

    offers: frozenset[Requirement] = frozenset({"last_queries", "readout"})

    def __init__(self, traits: ModelTraits, pool: BlockPool, weights: BranchWeights) -> None:
        """weights: W_O of every layer, through which stage 2 reads what an eviction does."""
        self.traits, self.pool, self.weights = traits, pool, weights
        self.windows: dict[int, _Window] = {}

    def note(self, sequence: int, outputs: Outputs, index: int, span: slice) -> None:
        """A run has scored positions of the index-th sequence: rows `span` of the outputs. Its row is in the pool."""
        longest = int(self.pool.lengths(sequence).max())
        scores = self._by_layer(outputs, "scores", (index, slice(None), slice(longest)))
        if sequence not in self.windows:
            self.windows[sequence] = _Window(torch.zeros_like(scores))
        window = self.windows[sequence]
        window.scores = _sum(scores, window.scores)
        window.q.append(self._by_layer(outputs, "q", span))
        window.context.append(self._by_layer(outputs, "context", span))
        window.residual.append(outputs["bpkv_residual"][span])
        window.ids.append(outputs["bpkv_topk_ids"][span].long())
        window.p.append(outputs["bpkv_topk_p"][span])
        window.covered.append(outputs["bpkv_covered_mass"][span])
        window.final.append(outputs["bpkv_readout"][span])

    def forget(self, sequence: int) -> None:
        """What was scored so far is of no more use: its compaction has been decided."""
        self.windows.pop(sequence, None)

    def collect(self, sequence: int, positions: int, trace: Trace, drafted: Sequence[float] = ()) -> ForwardStatistics:
        """Statistics at the last `positions` positions, all of which the engine has scored since the last compaction.

        Where a logit was NaN or infinite, every score is NaN, so that nothing is evicted.
        """
        assert not drafted, "an engine drafts nothing"
        window = self.windows[sequence]
        covered = torch.cat(window.covered)
        assert len(covered) == positions, "the engine scored other positions"
        with trace.range("readout", payload=positions):
            q, context = torch.cat(window.q, dim=1), torch.cat(window.context, dim=1)
            p, final, device = torch.cat(window.p), torch.cat(window.final), covered.device
            weights = position_weights(positions, device=device)
            end = self.pool.logical_length(sequence)
            return ForwardStatistics(
                q=q,
                context=context,
                residual=torch.cat(window.residual),
                topk_ids=torch.cat(window.ids),
                topk_p=p,
                covered_mass=covered,
                positions=torch.arange(end - positions, end, device=device),
                readout=DirectReadout(context, final, p, self.traits, self.weights, weights),
                scores=window.scores.where(covered.isfinite().all(), torch.nan),
            )

    def compacted(self, sequence: int, plan: CompactionPlan) -> None:
        """Positions before a compaction attended to entries that have gone: the next window begins after it."""
        self.forget(sequence)

    def prompt_ended(self, sequence: int) -> None:
        """Nothing of an engine depends on it."""

    def draft_answer(self, sequence: int, count: int, trace: Trace) -> None:
        """Never asked for: an engine's configuration has no lookahead."""
        assert not count, "an engine drafts nothing"

    def rehearse(self, sequence: int, count: int, trace: Trace) -> Rehearsal | None:
        """None: an engine's configuration has no rehearsal."""
        assert not count, "an engine rehearses nothing"
        return None

    @contextmanager
    def look_ahead(self, sequence: int, count: int, trace: Trace) -> Iterator[Sequence[float]]:
        """No tokens that may come: an engine's configuration has no lookahead."""
        assert not count, "an engine drafts nothing"
        yield ()

    def _by_layer(self, outputs: Outputs, name: str, part: Any) -> Tensor:
        """[L, ...] of that part of each layer's output."""
        return torch.stack([outputs[f"bpkv_{name}_{layer}"][part] for layer in range(self.traits.layers)])


def _sum(scores: Tensor, before: Tensor) -> Tensor:
    """[L, Hkv, T] and an earlier [L, Hkv, T'], T' <= T, since rows only come between compactions.

    An entry that is all that a head attends to has the largest finite score in each run, and in their sum too.
    """
    total = scores.double()
    total[..., : before.shape[-1]] += before
    largest = torch.finfo(torch.float32).max
    return torch.where(total.isfinite(), total.clamp(max=largest), total).float()
