"""What is kept by another measure before the scores decide."""

import torch
from torch import Tensor

from bpkv_trt.core.quota import Quota
from bpkv_trt.core.selection import lowest_in_units


def secured_by_unit(scores: Tensor, eligible: Tensor, quota: Quota, share: float) -> Tensor:
    """The highest scores of every unit, as many as it takes for floor(share x what the unit keeps) rows to stay.

    scores, eligible [L, Hkv, T]; protected rows count. Returns [L, Hkv, T] bool. With a share of at most 1 what is
    left is enough for the quota.
    """
    unit, inside = quota.unit, quota.unit >= 0
    protected = torch.zeros_like(quota.evict).index_add_(0, unit[inside], quota.protected(eligible)[inside])
    safe = (share * quota.keep().double()).long() - protected
    return lowest_in_units(-scores, eligible, unit, safe.clamp(min=0))


def secured_by_head(scores: Tensor, eligible: Tensor, quota: Quota, share: float) -> Tensor:
    """The highest scores of every head, as many as it takes for the head to keep floor(share x its even part).

    scores, eligible [L, Hkv, T]; a head's even part is what its unit keeps over the unit's heads, and protected rows
    count. Returns [L, Hkv, T] bool. With a share of at most 1 what is left is enough for the quota.
    """
    unit = quota.unit
    heads = torch.bincount(unit[unit >= 0], minlength=quota.evict.shape[0])
    safe = (share * (quota.keep() // heads.clamp(min=1)).double()).long()[unit.clamp(min=0)]  # [L, Hkv]
    head = torch.arange(unit.numel(), device=unit.device).view_as(unit)
    return lowest_in_units(-scores, eligible, head, (safe - quota.protected(eligible)).clamp(min=0).flatten())
