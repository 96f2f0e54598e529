"""What a selection is made from."""

from dataclasses import dataclass

from torch import Tensor

from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.evidence import Evidence
from bpkv_trt.core.quota import Quota


@dataclass(frozen=True)
class SelectionProblem:
    """Entries [L, Hkv, T] that compete, how many must go, and the means to judge a mask of them."""

    scores: Tensor  # [L, Hkv, T] fp32
    eligible: Tensor  # [L, Hkv, T] bool
    quota: Quota
    source: Evidence
    divergence: Divergence
