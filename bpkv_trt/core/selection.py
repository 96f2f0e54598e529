"""Which entries go."""

from dataclasses import dataclass

from torch import Tensor

from bpkv_trt.core.budget import Quota


@dataclass(frozen=True)
class Selection:
    """The outcome of a selection over [L, Hkv, T] entries."""

    evict: Tensor  # [L, Hkv, T] bool
    estimated_kl: float | None = None  # mask-level estimate; None where the policy has none
    estimated_kl_stage1: float | None = None  # the same before stage 2
    epsilon_relaxed: int = 0  # how often epsilon was halved
    rejected: int = 0  # entries passed over by the epsilon rule


def lowest_scores(scores: Tensor, eligible: Tensor, quota: Quota) -> Selection:
    """Evict the `quota.evict[u]` lowest-scored eligible entries of every unit; ties go to the earliest row."""
    raise NotImplementedError
