"""AdaKV: the heads of a layer share its budget by what their attention concentrates on."""

from typing import ClassVar

from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.safeguard import secured_by_head
from bpkv_trt.core.selection import Selection, lowest_scores
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.observation_window import ObservationWindowPolicy
from bpkv_trt.pool.view import SequenceView

ALPHA = 0.2  # of its even share, which no head goes below


class AdaKv(ObservationWindowPolicy):
    """SnapKV's score; the highest of a layer stay, whichever head they are in, after each head has been given its
    best floor(0.2 x even share) entries, protected ones counted.

    Source: Feng et al., arXiv:2407.11550; kvpress AdaKVPress 0.5.5 (`alpha_safeguard`) over SnapKVPress. AdaKV's own
    code has a floor of 0.5 and takes the maximum over 7 rows in place of the mean over 5. Layers keep equal totals, as
    there, so the scope is `layer` and no other.
    """

    name: ClassVar[str] = "adakv"
    source: ClassVar[str] = "arXiv:2407.11550"
    scopes: ClassVar[tuple[Scope, ...]] = ("layer",)

    def select(
        self, scores: Tensor, eligible: Tensor, quota: Quota, statistics: ForwardStatistics, view: SequenceView
    ) -> Selection:
        return lowest_scores(scores, eligible & ~secured_by_head(scores, eligible, quota, ALPHA), quota)
