"""Behaviour-preserving eviction: an entry goes only where the next-token distribution hardly changes without it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from bpkv_trt.core.evidence import score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.pooling import neighbour_mean
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.rehearsal import carried_over
from bpkv_trt.core.safeguard import secured_by_head, secured_by_unit
from bpkv_trt.core.selection import Selection
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.two_stage import two_stage
from bpkv_trt.policies.base import METHOD_OPTIONS, Policy, Requirement
from bpkv_trt.policies.evidence import evidence_of
from bpkv_trt.policies.headwise import HeadwisePolicy
from bpkv_trt.policies.observation_window import pooled_attention
from bpkv_trt.pool.view import SequenceView


class _LatestAttention(HeadwisePolicy):
    """SnapKV's score by the sequence's own latest tokens; drafted ones have no say."""

    def score_head(self, statistics: ForwardStatistics, view: SequenceView, layer: int, head: int) -> Tensor:
        a = EvidenceSource(statistics, view, self.traits).attention(layer, head).a  # [G, M, n]
        own = slice(None, -statistics.drafted or None)
        return F.pad(pooled_attention(a[:, own, own]), (0, statistics.drafted))


class Bpkv(Policy):
    """Score: the KL of the next-token distribution, averaged over the scoring positions, when the entry alone is
    deleted (c' - c = a / (1 - a) (c - v), read out to the logits). Selection: lowest scores first under the epsilon
    rule, then the boundary refined by the KL of the whole mask.

    Source: arXiv:2610.06479; the preset `paper` is that form, with what its description leaves open chosen by us.
    Ours: what a prompt's entries are needed for shows in the answer, so up to 32 tokens of it are drafted, greedily and
    on the full cache, and their distributions preserved as well (for a deferred compaction from the end of the prompt
    too, at a tenth of the weight, where that draft has not come true); the readout is the exact Jacobian, by 64 Fisher
    probes over all positions; and since a draft may take another turn than the answer, three fifths of what stays are
    what the model attends to while it repeats its prompt (KVzip's score), of which 512 tokens are repeated and a ridge
    regression tells the others. An answer's compaction repeats nothing: there scores are averaged over 5 neighbouring
    rows, and every head first keeps three fifths of its even part by what the latest tokens attend to (SnapKV's score).
    """

    name: ClassVar[str] = "bpkv"
    source: ClassVar[str] = "arXiv:2610.06479"
    requires: ClassVar[frozenset[Requirement]] = frozenset({"last_queries", "readout"})
    looks_ahead: ClassVar[bool] = True
    options: ClassVar[frozenset[str]] = METHOD_OPTIONS
    published: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "readout": "direct",
            "positions": 32,
            "recent": 40,  # covers the positions of a deferred compaction too
            "top_k": 64,
            "lookahead": 0,
            "rehearsal": 0,
            "pooling": 1,
            "safeguard": 0.0,
        }
    )

    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        # in float64: the largest finite scores, of entries that are all that a head attends to, add up to no infinity
        assert statistics.readout is not None, "the host was not asked for a readout"
        scores = statistics.scores
        if scores is None:
            scores = score_entries(evidence_of(statistics, view, self.traits), statistics.readout.divergence)
        return neighbour_mean(scores.double(), self.config.pooled_rows(statistics.rehearsal is not None)).float()

    def select(
        self, scores: Tensor, eligible: Tensor, quota: Quota, statistics: ForwardStatistics, view: SequenceView
    ) -> Selection:
        assert statistics.readout is not None, "the host was not asked for a readout"
        source, divergence = evidence_of(statistics, view, self.traits), statistics.readout.divergence
        if self.config.safeguard:
            eligible = eligible & ~self._secured(eligible, quota, statistics, view)
        return two_stage(scores, eligible, quota, source, divergence, self.config.epsilon, self.config.refine)

    def _secured(self, eligible: Tensor, quota: Quota, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        share = self.config.safeguard
        if statistics.rehearsal is not None:
            return secured_by_unit(carried_over(statistics.rehearsal, view, self.traits), eligible, quota, share)
        latest = _LatestAttention(self.config, self.traits).score(statistics, view)
        return secured_by_head(latest, eligible, quota, share)  # heads do not compete by it: they differ too much
