"""Evidence of one sequence in PyTorch: one head at a time, its attention recomputed."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.candidates import CandidatePool, choose
from bpkv_trt.core.deletion import HeadAttention, Retained, retained, singleton_scores
from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.evidence import Boundary, LayerEvidence
from bpkv_trt.core.held_rows import HeldRows
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits


class EvidenceSource:
    """The heads of one sequence, from its forward statistics and the rows in the pool."""

    def __init__(self, statistics: ForwardStatistics, view: HeldRows, traits: ModelTraits) -> None:
        assert traits.sink_logits == (statistics.sink_logits is not None), "the statistics contradict the traits"
        self.statistics = statistics
        self.view = view
        self.traits = traits

    def attention(self, layer: int, head: int) -> HeadAttention:
        group = slice(head * self.traits.group, (head + 1) * self.traits.group)
        sinks = self.statistics.sink_logits
        a = attention_weights(
            self.statistics.q[layer, :, group],
            self.view.keys(layer, head),
            self.traits.attention_scale,
            softcap=self.traits.attention_softcap,
            sink=None if sinks is None else sinks[layer, group],
        )
        return HeadAttention(
            a=a,
            c=self.statistics.context[layer, :, group].float(),
            v=self.view.values(layer, head).float(),
            sink_mass=None if sinks is None else (1 - a.sum(-1)).clamp_min_(0),
        )

    def retained_mass(self, layer: int, evict: Tensor) -> Tensor:
        kept = []  # summed up as it is: 1 - the rest would not know a small one
        for head, flags in enumerate(evict):
            held = self.attention(layer, head)
            mass = held.a.masked_fill(flags[: held.v.shape[0]], 0).sum(-1)
            kept.append(mass if held.sink_mass is None else mass + held.sink_mass)
        return torch.stack(kept)

    def layers(self) -> Iterator[tuple[int, LayerEvidence]]:
        assert self.statistics.readout is not None, "the host was not asked for a readout"
        for layer, rows in self.statistics.readout:
            positions, width, _, size = rows.shape
            yield layer, HeadwiseLayer(self, layer, rows.view(positions, width, -1, self.traits.group, size))

    def empty_table(self) -> Tensor:
        return torch.zeros(self.traits.layers, self.traits.kv_heads, self.longest, device=self.statistics.q.device)

    @property
    def longest(self) -> int:
        """Rows of the longest head."""
        return int(self.view.lengths.max())

    def choose(
        self, pool: CandidatePool, base: Tensor, unit: Tensor, shares: Tensor, floor: Tensor, divergence: Divergence
    ) -> tuple[Tensor, Tensor]:
        return choose(pool, base, unit, shares, floor, divergence)


class HeadwiseLayer:
    """One layer whose heads are looked at in turn, so that scratch memory is one head's."""

    def __init__(self, source: EvidenceSource, layer: int, rows: Tensor) -> None:
        self.source, self.layer, self.rows = source, layer, rows

    def singleton_scores(self, divergence: Divergence) -> Tensor:
        scores = torch.zeros(self.rows.shape[2], self.source.longest, device=self.rows.device)
        for head in range(scores.shape[0]):
            held = self._attention(head)
            rows = self.rows[:, :, head]
            scores[head, : held.v.shape[0]] = singleton_scores(held.a, held.c, held.v, rows, divergence)
        return scores

    def retained(self, evict: Tensor) -> Retained:
        return _stacked([self._retained(head, gone) for head, gone in enumerate(evict)])

    def nomination(self, evict: Tensor, slopes: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        first_order, admissible = torch.zeros(evict.shape, device=evict.device), torch.zeros_like(evict)
        for head, slope in enumerate(slopes):
            held = self._attention(head)
            span = slice(held.v.shape[0])
            gone = evict[head, span]
            state = retained(held, gone)
            left = state.mass.unsqueeze(-1) + torch.where(gone, held.a, -held.a)  # by evicting one, or having it back
            values = held.v - held.v.mean(0)
            pull = (slope * state.context).sum(-1, keepdim=True) - slope @ values.T  # [G, M, T]
            first_order[head, span] = (held.a / left * pull).sum((0, 1))
            admissible[head, span] = (left >= least[head]).all(0).all(0)
        return first_order, admissible

    def boundary(self, members: Tensor, before: Tensor, after: Tensor) -> Boundary:
        parts = []
        for head in members.any(-1).nonzero().flatten().tolist():
            held = self._attention(head)
            span = slice(held.v.shape[0])
            states = retained(held, before[head, span]), retained(held, after[head, span])
            own = members[head, span]
            parts.append((*states, held.a[:, :, own].permute(2, 0, 1), held.v[own] - held.v.mean(0)))
        earlier, later, a, values = zip(*parts, strict=True)
        return Boundary(_stacked(earlier), _stacked(later), torch.cat(a), torch.cat(values))

    def _attention(self, head: int) -> HeadAttention:
        return self.source.attention(self.layer, head)

    def _retained(self, head: int, evict: Tensor) -> Retained:
        held = self._attention(head)
        return retained(held, evict[: held.v.shape[0]])


def _stacked(states: Sequence[Retained]) -> Retained:
    mass, shift, context = zip(*((state.mass, state.shift, state.context) for state in states), strict=True)
    return Retained(torch.stack(mass), torch.stack(shift), torch.stack(context))
