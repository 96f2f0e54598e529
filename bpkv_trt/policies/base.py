"""The interface every eviction policy has."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal

from torch import Tensor

from bpkv_trt.config import BpkvConfig, Regime
from bpkv_trt.core.budget import ResolvedBudget, Scope
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.core.selection import Selection, lowest_scores
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.view import SequenceView

Requirement = Literal[
    "last_queries",
    "received_attention",
    "query_moments",
    "replay",
    "score_table",
    "readout",
    "output_projection",
]


# Options of BpkvConfig that belong to a method and not to compaction as such.
METHOD_OPTIONS = frozenset({"readout", "probes", "pooling", "rehearsal", "safeguard", "epsilon", "refine"})


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
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType({})  # options it sets where the user gave none
    published: ClassVar[Mapping[str, object] | None] = None  # the preset `paper`, where `defaults` are not as published
    running_attention: ClassVar[RunningAttention] = RunningAttention()  # what `received_attention` holds, if required
    looks_ahead: ClassVar[bool] = False  # whether drafted tokens are scoring positions where the user does not say
    options: ClassVar[frozenset[str]] = frozenset()  # those of METHOD_OPTIONS that it goes by; others are refused
    takes_layer_table: ClassVar[bool] = True
    evicts_nothing: ClassVar[bool] = False

    def __init__(self, config: BpkvConfig, traits: ModelTraits) -> None:
        self.config = config
        self.traits = traits

    @abstractmethod
    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        """Score every entry of one sequence.

        Returns [L, Hkv, T] fp32 with T the longest physical length; what lies beyond a head's own length, and rows
        of layers that are not compactable, is ignored by the caller. All that is given lies on the pool's device, and
        so must what is returned.
        """

    def layer_counts(self, budget: ResolvedBudget, layers: int) -> Sequence[int] | None:
        """Rows per head that every compactable layer keeps, where the policy shares the budget over layers by a rule.

        They add up to layers x budget.per_head, each within [budget.protected, budget.tokens]. None leaves the shares
        to the layer table. Only scopes `head` and `layer` have counts by layer.
        """
        return None

    def select(
        self, scores: Tensor, eligible: Tensor, quota: Quota, statistics: ForwardStatistics, view: SequenceView
    ) -> Selection:
        """Choose exactly `quota` eligible entries to evict; by default the lowest scores of every unit."""
        return lowest_scores(scores, eligible, quota)
