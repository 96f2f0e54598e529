"""No compression: the baseline of every comparison."""

from typing import ClassVar

import torch
from torch import Tensor

from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy
from bpkv_trt.pool.view import SequenceView


class Full(Policy):
    """Keeps every entry, whatever the budget; it runs through the same code as the others and is never compacted."""

    name: ClassVar[str] = "full"
    source: ClassVar[str] = "the uncompressed cache"
    evicts_nothing: ClassVar[bool] = True

    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        return torch.ones(self.traits.layers, self.traits.kv_heads, int(view.lengths.max()), device=statistics.q.device)
