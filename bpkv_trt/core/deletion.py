"""What one KV head's attention outputs become without some of its entries: q, K and V held fixed, renormalised."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bpkv_trt.core.divergence import Divergence

TILE_ELEMENTS = 2**19  # of the projected tile [G, t, M, C]: 2 MiB, about one core's cache
SMALLEST_TILE = 64  # rows


@dataclass(frozen=True)
class HeadAttention:
    """One KV head at the scoring positions."""

    a: Tensor  # [G, M, T] fp32 attention weights
    c: Tensor  # [M, G, D] fp32 context
    v: Tensor  # [T, D] fp32
    sink_mass: Tensor | None = None  # [G, M] what a sink logit holds, with value 0; it never leaves


@dataclass(frozen=True)
class Retained:
    """Attention outputs after a set of entries has left."""

    mass: Tensor  # [..., M] share of the attention that stays, 1 - mu
    shift: Tensor  # [..., M, D] c' - c
    context: Tensor  # [..., M, D] c' less the centre


@dataclass(frozen=True)
class DeletionStatistics:
    """What the evicted and the kept rows hold of each attention. Every row that a position sees is in one of the two.

    Values are taken less a centre, such as their mean: they share a large part, which would cancel only after rounding.
    """

    gone_mass: Tensor  # [..., M] fp32 sum of a
    gone_sum: Tensor  # [..., M, D] fp32 sum of a (v - centre)
    kept_mass: Tensor
    kept_sum: Tensor

    def retained(self) -> Retained:
        """c' - c is (mu c - rho) / (1 - mu) where little has left, and kept_sum / kept_mass - c elsewhere.

        Chosen for each query head and position. Where nothing stays (mass 0) shift and context are not finite: test the
        mass first.
        """
        context = self.gone_sum + self.kept_sum
        little = self.gone_mass < 0.5
        mass = torch.where(little, 1 - self.gone_mass, self.kept_mass)
        by_removed = (self.gone_mass.unsqueeze(-1) * context - self.gone_sum) / mass.unsqueeze(-1)
        left = self.kept_sum / mass.unsqueeze(-1)
        few = little.unsqueeze(-1)
        shift = torch.where(few, by_removed, left - context)
        return Retained(mass, shift, torch.where(few, context + shift, left))

    def with_sink(self, mass: Tensor, centre: Tensor) -> "DeletionStatistics":
        """A sink logit beside the rows, which holds mass [..., M], never leaves and has the value 0."""
        kept_sum = self.kept_sum - mass.unsqueeze(-1) * centre
        return replace(self, kept_mass=self.kept_mass + mass, kept_sum=kept_sum)


def singleton_scores(a: Tensor, c: Tensor, v: Tensor, g: Tensor, divergence: Divergence) -> Tensor:
    """The divergence that evicting each entry alone would cause.

    a [G, M, T], c [M, G, D], v [T, D], g [M, C, G, D] the head's readout rows, fp32. Returns [T] fp32. The shift of
    an entry is a / (1 - a) (g.c - g.v) summed over the G query heads; `a` is not clamped. An entry that is all that
    some head attends to (1 - a == 0) has no counterfactual: it gets the largest finite score, so it goes last.
    """
    group, positions, rows = a.shape
    width = g.shape[1]
    centre = v.mean(0)  # c and v share a large common part, which would cancel only after rounding
    projection = g.permute(2, 3, 0, 1).reshape(group, -1, positions * width)  # [G, D, M C]
    context = torch.einsum("mgd,mcgd->gmc", c - centre, g).reshape(group, 1, positions * width)
    values = v - centre
    sole = a == 1
    weights = torch.where(sole, 0.0, a / (1 - a)).permute(0, 2, 1).unsqueeze(-1)  # [G, T, M, 1]
    scores = torch.empty(rows, dtype=torch.float32, device=a.device)
    tile = max(SMALLEST_TILE, TILE_ELEMENTS // (group * positions * width))
    for start in range(0, rows, tile):
        span = slice(start, min(start + tile, rows))
        shift = a.new_zeros(values[span].shape[0], positions, width)
        for head in range(group):
            away = torch.addmm(context[head], values[span], projection[head], alpha=-1)  # g.(c - v) [t, M C]
            shift.addcmul_(away.view_as(shift), weights[head, span])
        scores[span] = divergence.of(shift)
    return scores.masked_fill_(sole.any(0).any(0), torch.finfo(torch.float32).max)


def retained(attention: HeadAttention, evict: Tensor) -> Retained:
    """One head without the entries of `evict` [T] bool, exactly: [G, M] and [G, M, D]."""
    centre = attention.v.mean(0)
    values = attention.v - centre
    gone = attention.a * evict
    stay = attention.a - gone  # each weight whole, in one of the two
    statistics = DeletionStatistics(gone.sum(-1), gone @ values, stay.sum(-1), stay @ values)
    if attention.sink_mass is not None:
        statistics = statistics.with_sink(attention.sink_mass, centre)
    return statistics.retained()


def read_shift(shift: Tensor, g: Tensor) -> Tensor:
    """Read shifts [H, G, M, D] of KV heads' contexts by their readout rows g [M, C, H, G, D]: [M, C], summed."""
    return torch.einsum("hgmd,mchgd->mc", shift, g)
