"""Evidence of one sequence by kernels: a whole layer at once, straight from the pages."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.core.attention import softcapped
from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.deletion import DeletionStatistics, Retained
from bpkv_trt.core.divergence import Divergence, FisherDivergence, TopKDivergence
from bpkv_trt.core.evidence import Boundary, LayerEvidence
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.held_rows import HeldRows
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.kernels.deletion import deletion_statistics, nomination
from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.paged import PagedCache
from bpkv_trt.kernels.refinement import MOST_CHANNELS, choose
from bpkv_trt.kernels.score import singleton_scores

CENTRE_ROWS = 64  # of each head, evenly spaced: their mean is as near to all values as rounding needs


class HeldPages(HeldRows, Protocol):
    """The rows of one sequence that kernels can find."""

    def caches(self) -> list[PagedCache]:
        """By layer, a batch of one sequence."""

    def gather(self, layer: int, head: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(k, v) [n, D] of rows `rows` of heads `head`."""


class KernelEvidenceSource(EvidenceSource):
    """As an `EvidenceSource`; what an eviction does is found by kernels, layer by layer."""

    def __init__(self, statistics: ForwardStatistics, view: HeldPages, traits: ModelTraits) -> None:
        super().__init__(statistics, view, traits)
        self.pages, self.caches = view, view.caches()
        positions = statistics.q.shape[1]
        self.offsets = torch.tensor([0, positions], dtype=torch.int32, device=statistics.q.device)
        self.options: dict[str, Any] = {
            "scale": traits.attention_scale,
            "softcap": traits.attention_softcap,
            "positions": positions,
        }
        self.normalisers: dict[int, Tensor] = {}  # by layer, [M, Hq]
        self.centres: dict[int, Tensor] = {}  # by layer, [Hkv, D]

    def retained_mass(self, layer: int, evict: Tensor) -> Tensor:
        return self.deletion(layer, evict).retained().mass

    def layers(self) -> Iterator[tuple[int, LayerEvidence]]:
        assert self.statistics.readout is not None, "the host was not asked for a readout"
        for layer, rows in self.statistics.readout:
            yield layer, KernelLayer(self, layer, rows)

    def choose(
        self, pool: CandidatePool, base: Tensor, unit: Tensor, shares: Tensor, floor: Tensor, divergence: Divergence
    ) -> tuple[Tensor, Tensor]:
        if base.shape[1] > MOST_CHANNELS:
            return super().choose(pool, base, unit, shares, floor, divergence)
        return choose(pool, base, unit, shares, floor, divergence)

    def deletion(self, layer: int, evict: Tensor) -> DeletionStatistics:
        """What evict [Hkv, T] takes and leaves of all heads of a layer: [Hkv, G, M] and [Hkv, G, M, D]."""
        q, cache, lse, centre = self.statistics.q[layer], self.caches[layer], self.normaliser(layer), self.centre(layer)
        found = deletion_statistics(q, evict[None], centre[None], self.offsets, cache, lse, **self.options)
        fields = found.gone_mass, found.gone_sum, found.kept_mass, found.kept_sum
        statistics = DeletionStatistics(*(self.by_head(field) for field in fields))
        sinks = self.statistics.sink_logits
        if sinks is None:
            return statistics
        mass = self.by_head(torch.exp(sinks[layer].float() - lse))
        return statistics.with_sink(mass, centre[:, None, None])

    def by_head(self, x: Tensor) -> Tensor:
        """[M, Hq, ...] -> [Hkv, G, M, ...]."""
        by_head: Tensor = x.unflatten(1, (self.traits.kv_heads, self.traits.group)).movedim(0, 2)
        return by_head

    def normaliser(self, layer: int) -> Tensor:
        """[M, Hq] fp32: the logarithm of the softmax's denominator, a sink logit included."""
        if layer not in self.normalisers:
            lse = log_sum_exp(self.statistics.q[layer], self.offsets, self.caches[layer], **self.options)
            sinks = self.statistics.sink_logits
            self.normalisers[layer] = lse if sinks is None else torch.logaddexp(lse, sinks[layer].float())
        return self.normalisers[layer]

    def centre(self, layer: int) -> Tensor:
        """[Hkv, D] fp32, about the mean of each head's values."""
        if layer not in self.centres:
            rows = np.linspace(0, self.view.lengths[layer] - 1, CENTRE_ROWS, dtype=np.int64, axis=-1)  # [Hkv, n]
            heads = np.repeat(np.arange(len(rows)), CENTRE_ROWS)
            _, values = self.pages.gather(layer, heads, rows.ravel())
            self.centres[layer] = values.float().unflatten(0, rows.shape).mean(1)
        return self.centres[layer]


class KernelLayer:
    """One layer, all its heads at once."""

    def __init__(self, source: KernelEvidenceSource, layer: int, rows: Tensor) -> None:
        """rows [M, C, Hq, D]."""
        self.source, self.layer = source, layer
        self.rows = rows.unflatten(2, (source.traits.kv_heads, source.traits.group))
        self.q = source.statistics.q[layer]  # [M, Hq, D]
        self.cache, self.lse, self.centre = source.caches[layer], source.normaliser(layer), source.centre(layer)

    def singleton_scores(self, divergence: Divergence) -> Tensor:
        if not isinstance(divergence, TopKDivergence | FisherDivergence):
            raise TypeError(f"divergence is a {type(divergence).__name__}; kernels know top-K logits and probes.")
        readout = self.rows.flatten(2, 3).contiguous()
        if self.q.dtype == torch.bfloat16:  # fp16 has not the range, and products of fp32 are slow
            readout = readout.to(self.q.dtype)
        return singleton_scores(
            self.q,
            self.source.statistics.context[self.layer],
            readout,
            divergence.p if isinstance(divergence, TopKDivergence) else None,
            divergence.weights,
            self.source.offsets,
            self.cache,
            self.lse,
            longest=self.source.longest,
            **self.source.options,
        )[0]

    def retained(self, evict: Tensor) -> Retained:
        return self.source.deletion(self.layer, evict).retained()

    def nomination(self, evict: Tensor, slopes: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        state = self.retained(evict)
        first_order, admissible = nomination(
            self.q,
            evict[None],
            self.centre[None],
            _by_position(state.mass),
            _by_position(state.context),
            _by_position(slopes),
            least[None],
            self.source.offsets,
            self.cache,
            self.lse,
            **self.source.options,
        )
        return first_order[0], admissible[0]

    def boundary(self, members: Tensor, before: Tensor, after: Tensor) -> Boundary:
        touched = members.any(-1)
        states = [self.retained(evict) for evict in (before, after)]
        earlier, later = (Retained(s.mass[touched], s.shift[touched], s.context[touched]) for s in states)
        head, row = members.nonzero(as_tuple=True)
        keys, values = self.source.pages.gather(self.layer, head.cpu().numpy(), row.cpu().numpy())
        q, lse = (self.source.by_head(each)[head] for each in (self.q.float(), self.lse))  # [P, G, M, D], [P, G, M]
        traits = self.source.traits
        logits = torch.einsum("pgmd,pd->pgm", q, keys.float()).mul_(traits.attention_scale)
        seen = row[:, None] <= self._last_rows()[head]  # [P, M]
        a = torch.where(seen[:, None], (softcapped(logits, traits.attention_softcap) - lse).exp(), 0.0)
        return Boundary(earlier, later, a, values.float() - self.centre[head])

    def _last_rows(self) -> Tensor:
        """[Hkv, M]: the last row that each position sees."""
        positions = self.q.shape[0]
        last: Tensor = self.cache.lengths[0, :, None] - positions + torch.arange(positions, device=self.q.device)
        return last


def _by_position(x: Tensor) -> Tensor:
    """[Hkv, G, M, ...] -> [M, Hq, ...], contiguous."""
    return x.movedim(2, 0).flatten(1, 2).contiguous()
