"""What one KV head's attention outputs become without some of its entries: q, K and V held fixed, renormalised."""

from dataclasses import dataclass

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
    """The head after a set of entries has left."""

    mass: Tensor  # [G, M] share of the attention that stays, 1 - mu
    shift: Tensor  # [G, M, D] c' - c


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
    """The head without the entries of `evict` [T] bool, exactly.

    c' - c is (mu c - rho) / (1 - mu) where little has left, and a sum over what stays elsewhere, chosen for each
    query head and position. Where nothing stays (mass 0) the shift is not finite: test the mass first.
    """
    centre = attention.v.mean(0)
    context, values = attention.c.transpose(0, 1) - centre, attention.v - centre  # [G, M, D], [T, D]
    gone = attention.a * evict
    stay = attention.a - gone  # each weight whole, in one of the two
    mu, kept_mass = gone.sum(-1), stay.sum(-1)
    rho, kept_sum = gone @ values, stay @ values
    if attention.sink_mass is not None:
        kept_mass = kept_mass + attention.sink_mass
        kept_sum = kept_sum - attention.sink_mass.unsqueeze(-1) * centre  # the sink's value is 0
    little = mu < 0.5
    mass = torch.where(little, 1 - mu, kept_mass)
    by_removed = (mu.unsqueeze(-1) * context - rho) / mass.unsqueeze(-1)
    by_kept = kept_sum / mass.unsqueeze(-1) - context
    return Retained(mass, torch.where(little.unsqueeze(-1), by_removed, by_kept))


def read_shift(shift: Tensor, g: Tensor) -> Tensor:
    """Read a shift [G, M, D] of one KV head's contexts by its readout rows g [M, C, G, D]: [M, C]."""
    return torch.einsum("gmd,mcgd->mc", shift, g)
