"""TOVA: what the last token attends to, one verdict for all heads of a layer."""

from typing import ClassVar

import torch
from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy, Requirement
from bpkv_trt.pool.view import SequenceView


class Tova(Policy):
    """Score: the attention of the last query, mean over all query heads of the layer; the last token itself ranks
    above all others.

    Source: Oren et al., arXiv:2401.06104; kvpress TOVAPress 0.5.5. All KV heads of a layer get the same scores, so in
    scope `head` they keep the same tokens, as there. Where heads hold different tokens the mean goes by token, and a
    head without it counts as attending 0. The original keeps a budget at every step; here it acts when a regime says.
    """

    name: ClassVar[str] = "tova"
    source: ClassVar[str] = "arXiv:2401.06104"
    requires: ClassVar[frozenset[Requirement]] = frozenset({"last_queries"})
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")

    @torch.no_grad()
    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        source = EvidenceSource(statistics, view, self.traits)
        scores = torch.zeros(*view.lengths.shape, int(view.lengths.max()), device=statistics.q.device)
        for layer in self.traits.compactable_layers:
            received = scores.new_zeros(view.logical_length)  # by token
            tokens = [view.positions(layer, head).long() for head in range(self.traits.kv_heads)]
            for head, held in enumerate(tokens):
                received[held] += source.attention(layer, head).a[:, -1].sum(0)
            received /= self.traits.query_heads
            received[-1] = 1.0  # no mean of attention weights exceeds 1
            for head, held in enumerate(tokens):
                scores[layer, head, : len(held)] = received[held]
        return scores
