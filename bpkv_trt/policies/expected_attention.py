"""Expected Attention: what queries yet to come are likely to attend to."""

from typing import ClassVar

import torch
from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.statistics import ForwardStatistics, QueryMoments
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.headwise import HeadwisePolicy
from bpkv_trt.pool.view import SequenceView

FUTURE = 512  # positions over which the rotation is averaged
EPSILON = 0.01  # lets the value norm speak where no attention is expected


class ExpectedAttention(HeadwisePolicy):
    """Score: (softmax_i(s q.k_i + s^2 / 2 k_i.C k_i), mean over the group, + epsilon) |v_i|, s the attention scale.

    q and C are mean and covariance of the prompt's queries before RoPE, rotated by the mean of the rotations at the
    next 512 positions: queries are taken for Gaussian, and the exponent is the log of the mean of exp(s q.k).

    Source: Devoto et al., arXiv:2510.00636, and kvpress ExpectedAttentionPress 0.5.5, whose defaults these are;
    epsilon is 0 in that class and 0.01, as here, in kvpress's own evaluations. Sinks stay outside the softmax and rank
    above all others. An attention softcap has no place in the Gaussian form and is left out.
    """

    name: ClassVar[str] = "expected_attention"
    source: ClassVar[str] = "arXiv:2510.00636"
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")
    requires: ClassVar[frozenset[Requirement]] = frozenset({"query_moments"})

    def score_head(self, statistics: ForwardStatistics, view: SequenceView, layer: int, head: int) -> Tensor:
        moments = statistics.query_moments
        assert moments is not None, "the host was not asked for query moments"
        mean, covariance = self._future(moments, view.logical_length, layer, head)
        k, v = view.keys(layer, head).float(), view.values(layer, head).float()
        scale = self.traits.attention_scale
        logits = scale * mean @ k.T + scale**2 / 2 * ((k @ covariance) * k).sum(-1)  # [G, n]
        sink = view.positions(layer, head) < self.config.sinks
        attention = torch.softmax(logits.masked_fill(sink, -torch.inf), dim=-1).mean(0)
        scores = (attention + EPSILON) * v.norm(dim=-1)
        return torch.where(sink, scores.max() + 1, scores)

    def _future(self, moments: QueryMoments, start: int, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Mean [G, D] and covariance [G, D, D] of one group's queries at the positions from `start` on."""
        group = slice(head * self.traits.group, (head + 1) * self.traits.group)
        rotation = mean_rotation(moments.inverse_frequencies[layer], start, FUTURE)
        return moments.mean[layer, group] @ rotation.T, rotation @ moments.covariance[layer, group] @ rotation.T


def mean_rotation(inverse_frequencies: Tensor, start: int, count: int) -> Tensor:
    """[D, D] fp32 mean of the RoPE matrices at positions start .. start + count - 1; halves turn against each other.

    Angles are taken in float64, so that far positions keep their phase.
    """
    positions = torch.arange(start, start + count, dtype=torch.float64, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies.double()  # [count, D / 2]
    cos, sin = angles.cos().mean(0).diag(), angles.sin().mean(0).diag()
    return torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)]).float()
