"""Stage 2: the boundary of a mask, chosen again one entry at a time by the divergence of the mask as a whole."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.deletion import HeadAttention, Retained, read_shift, retained
from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.evidence import HeadSource
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
    chosen, total = choose(pool, base, unit, shares, floor[unit], problem.divergence)
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
    for layer, rows in problem.source.rows():
        slopes = torch.einsum("mchgd,mc->hgmd", rows, gradient)
        for head in (unit[layer] >= 0).nonzero().flatten().tolist():
            held = problem.source.attention(layer, head)
            span = slice(held.v.shape[0])
            gone = evict[layer, head, span]
            state = retained(held, gone)
            left = state.mass.unsqueeze(-1) + torch.where(gone, held.a, -held.a)  # by evicting one, or having it back
            least = floor[unit[layer, head]].clamp_min(LEAST_MASS)
            admissible[layer, head, span] = (left >= least).all(0).all(0)
            first_order[layer, head, span] = _slope_of_entries(held, state, slopes[head], left)
    restore = lowest_in_units(-first_order, evict & eligible, unit, shares)
    extend = lowest_in_units(first_order + problem.scores, eligible & ~evict & admissible, unit, shares)
    return restore, extend


def _slope_of_entries(held: HeadAttention, state: Retained, slope: Tensor, left: Tensor) -> Tensor:
    # sum over (g, m) of a / left (c' - v) . slope -> [T]: what evicting a kept, or having evicted a gone entry, costs.
    centre = held.v.mean(0)
    context = held.c.transpose(0, 1) + state.shift - centre  # [G, M, D]
    pull = (slope * context).sum(-1, keepdim=True) - slope @ (held.v - centre).T  # [G, M, T]
    return (held.a / left * pull).sum((0, 1))


@dataclass
class CandidatePool:
    """P entries that may go, everything already read out, and the S heads that they belong to."""

    layer: Tensor  # [P] int64
    head: Tensor  # [P]
    row: Tensor  # [P]
    owner: Tensor  # [P] index into the S heads
    a: Tensor  # [P, G, M]
    values: Tensor  # [P, M, C, G] g.v
    mass: Tensor  # [S, G, M] retained by the head as the mask grows
    contexts: Tensor  # [S, M, C, G] g.c' of the head as the mask grows

    def shifts(self, which: Tensor) -> Tensor:
        """[P', M, C]: what evicting each of `which` next would add to the shift."""
        away = self.contexts[self.owner[which]] - self.values[which]
        return torch.einsum("pgm,pmcg->pmc", self.a[which] / self.left(which), away)

    def left(self, which: Tensor) -> Tensor:
        """[P', G, M]: the mass its head would retain."""
        return self.mass[self.owner[which]] - self.a[which]

    def evict(self, index: int) -> None:
        """Let one entry go: c'' = c' + a / (s - a) (c' - v), s'' = s - a."""
        owner = self.owner[index]
        left = self.mass[owner] - self.a[index]
        weight = (self.a[index] / left).T.unsqueeze(1)  # [M, 1, G]
        self.contexts[owner] += weight * (self.contexts[owner] - self.values[index])
        self.mass[owner] = left


def gather(
    source: HeadSource, members: Tensor, evict: Tensor, start: Tensor, shift: Tensor
) -> tuple[CandidatePool, Tensor]:
    """The pool of `members` [L, Hkv, T] as they stand under mask `start`, and the shift [M, C] of that mask.

    `shift` belongs to `evict`, which differs from `start` in heads of members only.
    """
    layer, head, row = members.nonzero(as_tuple=True)
    touched, owner = torch.unique(torch.stack([layer, head], 1), dim=0, return_inverse=True)  # ascending, as members
    parts: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for at, rows in source.rows():
        for each in touched[touched[:, 0] == at, 1].tolist():
            held, g = source.attention(at, each), rows[:, :, each]
            span = slice(held.v.shape[0])
            state = retained(held, start[at, each, span])
            shift = shift + read_shift(state.shift - retained(held, evict[at, each, span]).shift, g)
            centre = held.v.mean(0)
            own = members[at, each, span]
            parts[at, each] = (
                held.a[:, :, own].permute(2, 0, 1),
                torch.einsum("pd,mcgd->pmcg", held.v[own] - centre, g),
                state.mass[None],
                torch.einsum("gmd,mcgd->mcg", held.c.transpose(0, 1) + state.shift - centre, g)[None],
            )
    a, values, mass, contexts = (torch.cat(part) for part in zip(*(parts[key] for key in sorted(parts)), strict=True))
    return CandidatePool(layer, head, row, owner, a, values, mass, contexts), shift


def choose(
    pool: CandidatePool, base: Tensor, unit: Tensor, shares: Tensor, floor: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """Greedily evict `shares[u]` candidates of each unit, always the one with the smallest increment at base [M, C].

    unit, floor [P] of the candidates. Ties go to the lowest index. A candidate waits while it would leave its head
    less than its floor. Returns chosen [P] bool, short of the shares where none was left to take, and the shift.
    """
    chosen = torch.zeros_like(unit, dtype=torch.bool)
    remaining = shares.clone()
    least = floor.clamp_min(LEAST_MASS)[:, None, None]
    shifts = pool.shifts(torch.arange(unit.shape[0], device=unit.device))  # [P, M, C]
    while bool((remaining > 0).any()):
        stable = (pool.mass[pool.owner] - pool.a >= least).flatten(1).all(1)
        candidates = (~chosen & stable & (remaining[unit] > 0)).nonzero().squeeze(1)
        if candidates.shape[0] == 0:
            break
        increments = divergence.increment(base, shifts[candidates])
        least_costly = increments[increments.isfinite()].min() if bool(increments.isfinite().any()) else None
        if least_costly is None:
            break
        best = int(candidates[(increments == least_costly).nonzero()[0, 0]])
        base = base + shifts[best]
        pool.evict(best)
        chosen[best] = True
        remaining[unit[best]] -= 1
        affected = (pool.owner == pool.owner[best]).nonzero().squeeze(1)
        shifts[affected] = pool.shifts(affected)
    return chosen, base
