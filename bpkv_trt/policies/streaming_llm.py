"""StreamingLLM: attention sinks and the most recent tokens."""

from typing import ClassVar

from torch import Tensor

from bpkv_trt.core.budget import Scope
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy
from bpkv_trt.pool.view import SequenceView


class StreamingLlm(Policy):
    """Score: the logical position, so the oldest entries go first. The first `sinks` tokens (4) are protected already.

    Source: Xiao et al., arXiv:2309.17453. Unlike there, keys keep the positions at which they were encoded.
    """

    name: ClassVar[str] = "streaming_llm"
    source: ClassVar[str] = "arXiv:2309.17453"
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")

    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        return view.position_table().float()
