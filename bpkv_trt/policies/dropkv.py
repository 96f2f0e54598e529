"""DropKV: how far an attention output moves when one entry is dropped and the rest renormalised."""

from typing import ClassVar

import torch
from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.headwise import HeadwisePolicy
from bpkv_trt.pool.view import SequenceView


class DropKv(HeadwisePolicy):
    """Score: sum over the window of (a / (1 - a))^2 |v - o|^2, mean over the head's group; o is the attention output.

    The square of the exact shift o' - o of each query head, before W_O: no weights of the model enter. An entry that is
    all that some head attends to (a == 1) has no counterfactual and goes last.

    Source: DropKV, OpenReview MqfNzH3TVH, and the press proposed to kvpress (pull request 285). The window is the M
    scoring positions; the mean over the group is the press's, the published formula being for one head. The press also
    keeps 1 - a above 1e-6 and can pool over neighbours; neither is in the formula, and both are left out. Scores share
    a unit, so scopes `layer` and `global` make sense as well as the published one, `head`.
    """

    name: ClassVar[str] = "dropkv"
    source: ClassVar[str] = "OpenReview MqfNzH3TVH"
    requires: ClassVar[frozenset[Requirement]] = frozenset({"last_queries"})
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")

    def score_head(self, statistics: ForwardStatistics, view: SequenceView, layer: int, head: int) -> Tensor:
        held = EvidenceSource(statistics, view, self.traits).attention(layer, head)
        outputs = held.c.transpose(0, 1)  # [G, M, D]
        # Differences, and not |v|^2 - 2 v.o + |o|^2: values and outputs share a large part that would cancel late.
        away = torch.cdist(outputs, held.v, compute_mode="donot_use_mm_for_euclid_dist")  # [G, M, n]
        sole = held.a == 1
        odds = torch.where(sole, 0.0, held.a / (1 - held.a))
        scores = (odds * away).square().sum(1).mean(0)
        return scores.masked_fill_(sole.any(0).any(0), torch.finfo(torch.float32).max)
