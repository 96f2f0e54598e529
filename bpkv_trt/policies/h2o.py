"""H2O: heavy hitters, the entries that all queries so far attended to most."""

from typing import ClassVar

from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy, Requirement
from bpkv_trt.pool.view import SequenceView


class H2o(Policy):
    """Score: the attention received, sum over all queries that saw the entry, mean over the query heads of its group.

    Source: Zhang et al., arXiv:2306.14048. The sum is not divided by the number of those queries, so old entries are
    favoured, as there; the recent window that offsets this is protected already. There is no other parameter. The
    mean in place of the sum, as kvpress has it, is the policy `observed_attention`.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "arXiv:2306.14048"
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")
    requires: ClassVar[frozenset[Requirement]] = frozenset({"received_attention"})

    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        assert statistics.received_attention is not None, "the host was not asked for received attention"
        return statistics.received_attention
