"""Observed attention: H2O's sum, divided by how many queries could have added to it."""

from typing import ClassVar

from torch import Tensor

from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.h2o import H2o
from bpkv_trt.pool.view import SequenceView


class ObservedAttention(H2o):
    """Score: the attention received, mean over all queries that could see the entry (its own and every later one), and
    over the query heads of its group.

    Source: kvpress ObservedAttentionPress 0.5.5, its form of H2O: without the division old entries are favoured.
    """

    name: ClassVar[str] = "observed_attention"
    source: ClassVar[str] = "kvpress ObservedAttentionPress"

    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        received = super().score(statistics, view)
        return received / (view.logical_length - view.position_table())
