"""InertiaKV: attention received, as an average that moves slowly from step to step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from bpkv_trt.config import Regime
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.policies.h2o import H2o

DECAY = 0.9  # of the score at every step; half of it is forgotten in between six and seven


class InertiaKv(H2o):
    """Score: s <- 0.9 s + 0.1 a_t at every step, a_t the attention of query t, mean over the head's group.

    Source: the abstract of InertiaKV (2026), of which neither code nor defaults were to be found; all beyond "an
    exponential moving average over decode steps of the attention received" is our choice: 0.9, the mean over the group,
    and the start. The prompt's queries pass through the same average, so that decoding starts from a window attention
    over the end of the prompt, its weights falling by 0.9 a query. An entry starts at 0 with its own query; the recent
    window is protected until its average is filled. Meant for `deferred` and `generation`; in `prefill` it is the start
    value.
    """

    name: ClassVar[str] = "inertiakv"
    source: ClassVar[str] = "InertiaKV (2026), abstract"
    regimes: ClassVar[tuple[Regime, ...]] = ("deferred", "generation", "prefill")
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType({"regime": ("deferred", "generation")})
    running_attention: ClassVar[RunningAttention] = RunningAttention(decay=DECAY)
