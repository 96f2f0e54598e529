"""Policies that judge one KV head at a time."""

from abc import abstractmethod

import torch
from torch import Tensor

from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy
from bpkv_trt.pool.view import SequenceView


class HeadwisePolicy(Policy):
    """Scores the heads of the compactable layers one by one, so that scratch memory is one head's."""

    @torch.no_grad()
    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        longest = int(view.lengths.max())
        scores = torch.zeros(self.traits.layers, self.traits.kv_heads, longest, device=statistics.q.device)
        for layer in self.traits.compactable_layers:
            for head in range(self.traits.kv_heads):
                scores[layer, head, : view.lengths[layer, head]] = self.score_head(statistics, view, layer, head)
        return scores

    @abstractmethod
    def score_head(self, statistics: ForwardStatistics, view: SequenceView, layer: int, head: int) -> Tensor:
        """[n] fp32 scores of one head's rows."""
