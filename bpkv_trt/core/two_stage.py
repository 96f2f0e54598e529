"""BP-KV's selection: singleton scores under the epsilon rule, then a refinement of the mask as a whole."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.evidence import Evidence, mask_shift
from bpkv_trt.core.problem import SelectionProblem
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.refinement import refine_mask
from bpkv_trt.core.selection import Selection, count_by_unit, lowest_scores
from bpkv_trt.core.stability import LEAST_MASS, admissible_walk

HALVINGS = 6  # of epsilon, before it is given up for a unit


@torch.no_grad()
def two_stage(
    scores: Tensor,
    eligible: Tensor,
    quota: Quota,
    source: Evidence,
    divergence: Divergence,
    epsilon: float,
    refine: int,
) -> Selection:
    """Evict exactly `quota` of the eligible entries, for the least divergence of the mask as a whole.

    scores, eligible [L, Hkv, T]; `refine` evictions, shared over the units, are chosen again by mask-level increments
    (0: stage 1 alone). Where a unit cannot fill its quota under epsilon, its epsilon is halved and counted.
    """
    problem = SelectionProblem(scores, eligible, quota, source, divergence)
    stage1, floor = admissible_lowest(problem, epsilon)
    shift = mask_shift(source, stage1.evict)
    before = float(divergence.of(shift))
    if not math.isfinite(before):
        return stage1  # some head lost all its mass: no estimate, so nothing to refine by
    evict, after = stage1.evict, before
    if refine > 0 and bool(evict.any()):
        refined, refined_shift = refine_mask(problem, evict, shift, floor, refine)
        estimate = float(divergence.of(refined_shift))
        if estimate < before:
            evict, after = refined, estimate
    return replace(stage1, evict=evict, estimated_kl=after, estimated_kl_stage1=before)


def admissible_lowest(problem: SelectionProblem, epsilon: float) -> tuple[Selection, Tensor]:
    """Stage 1: the lowest scores of every unit that the epsilon rule accepts, and the epsilon [U] each unit ended with.

    The rule binds each KV head by itself, so a head's walk over its own ranking needs no other head; and one that would
    be stable without all that is eligible needs no walk. A unit that runs out walks again at half the epsilon, after
    `HALVINGS` at 0, and if even that is short takes any eligible entry.
    """
    quota, units = problem.quota, problem.quota.evict.shape[0]
    floor = torch.full((units,), epsilon, device=problem.scores.device)
    accepted = torch.zeros_like(problem.eligible)
    pending, relaxed = quota.evict > 0, 0
    for halving in range(1, HALVINGS + 3):
        _walk_units(problem, accepted, pending, floor)
        pending = count_by_unit(accepted, quota.unit, units) < quota.evict
        short = int(pending.sum())
        if short == 0:
            break
        relaxed += short
        floor[pending] = epsilon / 2**halving if halving <= HALVINGS else 0.0
    anything = (pending[quota.unit] & (quota.unit >= 0)).unsqueeze(-1)
    accepted = torch.where(anything, problem.eligible, accepted)
    evict = lowest_scores(problem.scores, accepted, quota).evict
    return Selection(evict, epsilon_relaxed=relaxed, rejected=_passed_over(problem, accepted, evict)), floor


def _walk_units(problem: SelectionProblem, accepted: Tensor, pending: Tensor, floor: Tensor) -> None:
    # Fills accepted [L, Hkv, T] for the heads of pending [U] units.
    unit, eligible = problem.quota.unit, problem.eligible
    walking = (unit >= 0) & pending[unit] & eligible.any(-1)
    owners, floors, quotas = unit.tolist(), floor.tolist(), problem.quota.evict.tolist()
    for layer in walking.any(-1).nonzero().flatten().tolist():
        least = floor[unit[layer]].clamp_min(LEAST_MASS)[:, None, None]
        stable = (problem.source.retained_mass(layer, eligible[layer]) >= least).flatten(1).all(1)  # whatever goes
        accepted[layer] |= eligible[layer] & (walking[layer] & stable).unsqueeze(-1)
        for head in (walking[layer] & ~stable).nonzero().flatten().tolist():
            rows = eligible[layer, head].nonzero().squeeze(1)
            order = rows[problem.scores[layer, head, rows].argsort(stable=True)]
            a = problem.source.attention(layer, head).a
            owner = owners[layer][head]
            taken = admissible_walk(a, order, floors[owner], quotas[owner])
            accepted[layer, head, : taken.shape[0]] = taken


def _passed_over(problem: SelectionProblem, accepted: Tensor, evict: Tensor) -> int:
    # Eligible entries that the rule refused although they rank before the last one that their unit did evict.
    unit = problem.quota.unit.unsqueeze(-1).expand_as(problem.scores)
    last = problem.scores.new_full(problem.quota.evict.shape, -math.inf)
    last = last.scatter_reduce(0, unit[evict], problem.scores[evict], "amax")
    refused = problem.eligible & ~accepted & (unit >= 0)
    return int((problem.scores[refused] < last[unit[refused]]).sum())
