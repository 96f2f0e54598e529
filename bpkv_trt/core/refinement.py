"""Stage 2: the boundary of a mask, chosen again one entry at a time by the divergence of the mask as a whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.deletion import read_shift
from bpkv_trt.core.evidence import Evidence
from bpkv_trt.core.problem import SelectionProblem
from bpkv_trt.core.selection import lowest_in_units
from bpkv_trt.core.stability import LEAST_MASS


def refine_mask(
    problem: SelectionProblem, evict: Tensor, shift: Tensor, floor: Tensor, refine: int
) -> tuple[Tensor, Tensor]:
    """Give back up to `refine` evictions and choose as many again, per unit, from those and as many kept entries.

    evict [L, Hkv, T] the mask of stage 1 and shift [M, C] its read-out shift; floor [U] the epsilon of each unit.
    Returns the new mask, of the same count in every unit, and its shift; or the old ones where the epsilon rule left
    no way to fill a quota. Cost: two passes over the readout; then per step, for a pool of P = 2 `refine` candidates,
    one increment of each, O(P M C), and new shifts for those of the touched head.
    """
    shares = unit_shares(problem.quota.evict, refine)
    restore, extend = nominate(problem, evict, shift, floor, shares)
    start = evict & ~restore
    pool, base = gather(problem.source, restore | extend, evict, start, shift)
    unit = problem.quota.unit[pool.layer, pool.head]
    chosen, total = problem.source.choose(pool, base, unit, shares, floor[unit], problem.divergence)
    if int(chosen.sum()) < int(shares.sum()):
        return evict, shift
    refined = start.clone()
    refined[pool.layer[chosen], pool.head[chosen], pool.row[chosen]] = True
    return refined, total


def unit_shares(quota: Tensor, refine: int) -> Tensor:
    """[U]: `refine` steps dealt evenly over the units that evict; fewer than one each are spread over all layers."""
    active = quota > 0
    units = max(1, int(active.sum()))
    turn = active.cumsum(0)  # 1 to units
    return torch.where(active, turn * refine // units - (turn - 1) * refine // units, 0).minimum(quota)


def nominate(
    problem: SelectionProblem, evict: Tensor, shift: Tensor, floor: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """The `shares[u]` evicted entries most worth restoring and kept ones least costly to evict: two [L, Hkv, T] masks.

    First order in the divergence at `shift`, whose gradient makes one row of all C, so this pass costs 1/C of
    scoring; a kept entry adds its singleton score, the second-order part that is its own.
    """
    gradient = problem.divergence.gradient(shift)  # [M, C]
    unit, eligible = problem.quota.unit, problem.eligible
    first_order = torch.zeros_like(problem.scores)
    admissible = torch.zeros_like(evict)
    least = floor[unit].clamp_min(LEAST_MASS)  # [L, Hkv]; heads of no unit have an epsilon that nobody looks at
    for layer, held in problem.source.layers():
        slopes = torch.einsum("mchgd,mc->hgmd", held.rows, gradient)
        first_order[layer], admissible[layer] = held.nomination(evict[layer], slopes, least[layer])
    restore = lowest_in_units(-first_order, evict & eligible, unit, shares)
    extend = lowest_in_units(first_order + problem.scores, eligible & ~evict & admissible, unit, shares)
    return restore, extend


def gather(
    source: Evidence, members: Tensor, evict: Tensor, start: Tensor, shift: Tensor
) -> tuple[CandidatePool, Tensor]:
    """The pool of `members` [L, Hkv, T] as they stand under mask `start`, and the shift [M, C] of that mask.

    `shift` belongs to `evict`, which differs from `start` in heads of members only.
    """
    layer, head, row = members.nonzero(as_tuple=True)
    counts = members.sum(-1)  # [L, Hkv]
    sizes = counts[counts > 0]
    owner = torch.arange(sizes.shape[0], device=members.device).repeat_interleave(sizes)
    parts: dict[int, tuple[Tensor, ...]] = {}
    for at, held in source.layers():
        touched = counts[at].nonzero().squeeze(1)
        if touched.shape[0] == 0:
            continue
        boundary = held.boundary(members[at], evict[at], start[at])
        rows = held.rows[:, :, touched]  # [M, C, H, G, D]
        shift = shift + read_shift(boundary.after.shift - boundary.before.shift, rows)
        values = read_values(boundary.values, rows, counts[at][touched].tolist())
        contexts = torch.einsum("hgmd,mchgd->hmcg", boundary.after.context, rows)
        parts[at] = boundary.a, values, boundary.after.mass, contexts
    joined = (torch.cat(part) for part in zip(*(parts[at] for at in sorted(parts)), strict=True))
    return CandidatePool(layer, head, row, owner, *joined), shift


def read_values(values: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """values [P, D], `counts[h]` of each head h, by the head's readout rows [M, C, H, G, D]: [P, M, C, G]."""
    of_head = torch.split(values, list(counts))  # a head at a time: rows are never repeated per entry
    return torch.cat([torch.einsum("pd,mcgd->pmcg", own, rows[:, :, head]) for head, own in enumerate(of_head)])
