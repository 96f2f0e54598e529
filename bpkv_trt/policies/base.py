"""The interface every eviction policy has."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.selection import Selection, lowest_scores
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.view import SequenceView

Requirement = Literal["last_queries", "received_attention", "query_moments", "replay", "score_table", "readout"]


class Policy(ABC):
    """A rule that scores entries: a low score is evicted first."""

    name: ClassVar[str]
    source: ClassVar[str]
    requires: ClassVar[frozenset[Requirement]] = frozenset()
    scopes: ClassVar[frozenset[str]] = frozenset({"head", "layer", "global"})
    regimes: ClassVar[frozenset[str]] = frozenset({"prefill", "deferred", "generation"})
    evicts_nothing: ClassVar[bool] = False

    def __init__(self, config: BpkvConfig, traits: ModelTraits) -> None:
        self.config = config
        self.traits = traits

    @abstractmethod
    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        """Score every entry of one sequence.

        Returns [L, Hkv, T] fp32 with T the longest physical length; what lies beyond a head's own length, and rows
        of layers that are not compactable, is ignored by the caller.
        """

    def select(
        self, scores: Tensor, eligible: Tensor, quota: Quota, statistics: ForwardStatistics, view: SequenceView
    ) -> Selection:
        """Choose exactly `quota` eligible entries to evict; by default the lowest scores of every unit."""
        return lowest_scores(scores, eligible, quota)
