"""The interface every eviction policy has."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from bpkv_trt.config import BpkvConfig, Regime
from bpkv_trt.core.budget import Scope
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.selection import Selection, lowest_scores
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.view import SequenceView

Requirement = Literal["last_queries", "received_attention", "query_moments", "replay", "score_table", "readout"]


class Policy(ABC):
    """A rule that scores entries: a low score is evicted first.

    `requires` names what the optional fields of `ForwardStatistics` must hold; queries and distribution at the scoring
    positions come always.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    requires: ClassVar[frozenset[Requirement]] = frozenset()
    scopes: ClassVar[tuple[Scope, ...]] = ("global", "layer", "head")  # that it can have, its own choice first
    regimes: ClassVar[tuple[Regime, ...]] = ("prefill", "generation", "deferred")
    takes_layer_table: ClassVar[bool] = True
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
