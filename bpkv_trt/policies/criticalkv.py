"""CriticalKV: attention weighed by what the value behind it adds to the layer's output."""

from typing import ClassVar

import torch
from torch import Tensor

from bpkv_trt.core.deletion import TILE_ELEMENTS
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.selection import Selection, count_by_unit, lowest_in_units, lowest_scores
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.observation_window import ObservationWindowPolicy
from bpkv_trt.policies.snapkv import SnapKv
from bpkv_trt.pool.view import SequenceView

EPSILON = 1e-4  # lets the value speak where no attention is seen


class CriticalKv(ObservationWindowPolicy):
    """Half of the budget goes to the highest s, the rest to the highest (s + epsilon) x mean over the group of
    |W_O v|_1, with s SnapKV's pooled attention.

    Source: Feng et al., arXiv:2502.03805; kvpress CriticalKVPress 0.5.5 over SnapKVPress, whose defaults these are
    (first stage 0.5, epsilon 1e-4). Protected entries count as part of the first half, as the window does there. A norm
    between W_O and the residual (Gemma) is left out, as there. In scope `global` a layer table weighs the second half.
    """

    name: ClassVar[str] = "criticalkv"
    source: ClassVar[str] = "arXiv:2502.03805"
    requires: ClassVar[frozenset[Requirement]] = frozenset({"last_queries", "output_projection"})

    def score_head(self, statistics: ForwardStatistics, view: SequenceView, layer: int, head: int) -> Tensor:
        assert statistics.projections is not None, "the host was not asked for output projections"
        observed = super().score_head(statistics, view, layer, head)
        weight, _ = statistics.projections.output_projection(layer)  # [d, Hq D]
        width = self.traits.group * self.traits.head_dim
        own = weight[:, head * width : (head + 1) * width].reshape(-1, self.traits.group, self.traits.head_dim).float()
        return (observed + EPSILON) * projected_norms(view.values(layer, head).float(), own)

    def select(
        self, scores: Tensor, eligible: Tensor, quota: Quota, statistics: ForwardStatistics, view: SequenceView
    ) -> Selection:
        observed = SnapKv(self.config, self.traits).score(statistics, view)  # again, so that none need be held
        protected = count_by_unit(quota.protected(eligible).unsqueeze(-1), quota.unit, quota.evict.shape[0])
        first = (quota.keep() // 2 - protected).clamp(min=0)
        secured = lowest_in_units(-observed, eligible, quota.unit, first)
        return lowest_scores(scores, eligible & ~secured, quota)


def projected_norms(values: Tensor, projection: Tensor) -> Tensor:
    """Mean over the group of |W_h v|_1: values [n, D], projection [d, G, D], fp32. Returns [n].

    One query head and one tile of rows at a time: nothing of size n x d, no values repeated.
    """
    norms = torch.zeros_like(values[:, 0])
    tile = max(64, TILE_ELEMENTS // projection.shape[0])
    for start in range(0, values.shape[0], tile):
        rows = slice(start, start + tile)
        for head in projection.unbind(1):
            norms[rows] += (values[rows] @ head.T).abs_().sum(-1)
    return norms / projection.shape[1]
