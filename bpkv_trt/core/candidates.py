"""Entries that may go, one at a time, always the one whose leaving costs least now."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.stability import LEAST_MASS


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
        owner = int(self.owner[index])
        left = self.mass[owner] - self.a[index]
        weight = (self.a[index] / left).T.unsqueeze(1)  # [M, 1, G]
        self.contexts[owner] += weight * (self.contexts[owner] - self.values[index])
        self.mass[owner] = left


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
        remaining[int(unit[best])] -= 1
        affected = (pool.owner == pool.owner[best]).nonzero().squeeze(1)
        shifts[affected] = pool.shifts(affected)
    return chosen, base
