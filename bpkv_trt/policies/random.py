"""Random eviction: what any scorer must beat."""

from typing import ClassVar

import torch
from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy
from bpkv_trt.pool.view import SequenceView


class Random(Policy):
    """Score: uniform on [0, 1), independent for every entry.

    Source: the usual lower baseline (kvpress RandomPress). Drawn on the CPU from `seed` plus the logical length, so
    that a run repeats itself, later compactions draw afresh, and other requests change nothing.
    """

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "baseline"
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")

    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed + view.logical_length)
        shape = (self.traits.layers, self.traits.kv_heads, int(view.lengths.max()))
        return torch.rand(shape, generator=generator).to(statistics.q.device)
