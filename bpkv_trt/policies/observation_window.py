"""What SnapKV and all that build on it share: the attention of an observation window, pooled over neighbouring rows."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.pooling import neighbour_mean
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.headwise import HeadwisePolicy
from bpkv_trt.pool.view import SequenceView

KERNEL = 5  # rows averaged around each: keeps the neighbours of what is attended


class ObservationWindowPolicy(HeadwisePolicy):
    """Score: attention from the observation window, mean over its positions and the head's group, average-pooled over 5
    neighbouring rows (zeros past the ends count).

    The window is the M scoring positions, so that all policies see as much (32 in SnapKV's code, 64 in kvpress); its
    own rows are outside the pooling and rank above all others. Mean and pooling are those of kvpress SnapKVPress 0.5.5;
    SnapKV's own code sums over the window and lets every query head keep rows of its own, which a KV head that is
    stored once cannot.
    """

    requires: ClassVar[frozenset[Requirement]] = frozenset({"last_queries"})
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")

    def score_head(self, statistics: ForwardStatistics, view: SequenceView, layer: int, head: int) -> Tensor:
        a = EvidenceSource(statistics, view, self.traits).attention(layer, head).a
        return pooled_attention(a)


def pooled_attention(a: Tensor) -> Tensor:
    """a [G, M, n], attention of a head from the window that its last M rows are -> [n]: mean, averaged over neighbours.

    The window's own rows are left out of the average and rank above all: no mean of attention weights exceeds 1.
    """
    window = a.shape[1]
    observed = a[..., :-window].mean(dim=(0, 1))  # [n - M]
    return F.pad(neighbour_mean(observed, KERNEL), (0, window), value=1.0)
