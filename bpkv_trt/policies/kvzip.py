"""KVzip: what the model needs to write its context down again."""

from typing import ClassVar

from torch import Tensor

from bpkv_trt.config import Regime
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Policy, Requirement
from bpkv_trt.pool.view import SequenceView


class KvZip(Policy):
    """Score: the largest attention that an entry gets, over queries and group, while the model is told to repeat the
    context and fed the context's own tokens as its answer. No question enters into it.

    Source: Kim et al., arXiv:2505.23416, and kvpress KVzipPress 0.5.5: the instructions, parts of 2048 tokens, the
    softmax over the part, the sinks and the repetition alone, and entries of all layers and heads competing. Every part
    is run over a copy of the sequence, which is released at once: beside the cache, the pool must hold a second one and
    the part. The repetition's positions follow the context's, and may pass what the model was trained on. Everything up
    to the end of the prompt, or to the last decoded token, is context, a chat template's tokens too (there, all but the
    template's beginning). A prompt's method: not for `generation`.
    """

    name: ClassVar[str] = "kvzip"
    source: ClassVar[str] = "arXiv:2505.23416"
    requires: ClassVar[frozenset[Requirement]] = frozenset({"replay"})
    regimes: ClassVar[tuple[Regime, ...]] = ("prefill", "deferred")

    def score(self, statistics: ForwardStatistics, view: SequenceView) -> Tensor:
        assert statistics.replay_attention is not None, "the host was not asked for a replay of the context"
        return statistics.replay_attention
