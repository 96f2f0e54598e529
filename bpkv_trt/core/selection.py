"""Which entries go."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.quota import Quota


@dataclass(frozen=True)
class Selection:
    """The outcome of a selection over [L, Hkv, T] entries."""

    evict: Tensor  # [L, Hkv, T] bool
    estimated_kl: float | None = None  # mask-level estimate; None where the policy has none or it is not finite
    estimated_kl_stage1: float | None = None  # the same before stage 2
    epsilon_relaxed: int = 0  # how often epsilon was halved, summed over units
    rejected: int = 0  # entries passed over by the epsilon rule


def lowest_scores(scores: Tensor, eligible: Tensor, quota: Quota) -> Selection:
    """Evict the `quota.evict[u]` lowest-scored eligible entries of every unit; ties go to the earliest row.

    scores [L, Hkv, T] float, eligible [L, Hkv, T] bool. Every unit must have as many eligible entries as it evicts.
    """
    available = count_by_unit(eligible, quota.unit, quota.evict.shape[0])
    assert bool((available >= quota.evict).all()), "a unit has fewer eligible entries than its quota"
    return Selection(lowest_in_units(scores, eligible, quota.unit, quota.evict))


def count_by_unit(mask: Tensor, unit: Tensor, units: int) -> Tensor:
    """[U] how many entries of mask [L, Hkv, T] each unit has; heads of unit -1 are not counted."""
    inside = unit >= 0
    counts = torch.zeros(units, dtype=torch.int64, device=mask.device)
    return counts.index_add_(0, unit[inside], mask.sum(-1)[inside])


def lowest_in_units(scores: Tensor, mask: Tensor, unit: Tensor, count: Tensor) -> Tensor:
    """The `count[u]` lowest-scored entries of mask in every unit, or all where there are fewer: [L, Hkv, T] bool.

    Ties go to the earliest row, then to the first layer and head.
    """
    by_row = (2, 0, 1)
    inside = (mask & (unit >= 0).unsqueeze(-1)).permute(by_row).flatten().nonzero().squeeze(1)
    order = scores.permute(by_row).flatten()[inside].argsort(stable=True)
    owner = unit.flatten()[inside[order] % unit.numel()]
    owner, grouped = owner.sort(stable=True)
    sizes = torch.bincount(owner, minlength=count.shape[0])
    rank = torch.arange(owner.shape[0], device=owner.device) - (sizes.cumsum(0) - sizes)[owner]
    chosen = inside[order[grouped[rank < count[owner]]]]
    flags = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    flags[chosen] = True
    layers, heads, rows = mask.shape
    return flags.view(rows, layers, heads).permute(1, 2, 0).contiguous()
