"""InertiaKV, scored once."""

from typing import ClassVar

from bpkv_trt.config import Regime
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.policies.inertiakv import DECAY, InertiaKv


class InertiaKvScoreFree(InertiaKv):
    """Score: InertiaKV's as it is at the first decode step, never changed after it.

    Source: the abstract of InertiaKV (2026), its variant Score-Free. Ours: entries that come later have the mean score
    of their head, so among themselves the oldest go first: in `generation`, where the prompt is protected, a window
    that slides over the answer. Not for `prefill`, which comes before the first decode step.
    """

    name: ClassVar[str] = "inertiakv_score_free"
    regimes: ClassVar[tuple[Regime, ...]] = ("deferred", "generation")
    running_attention: ClassVar[RunningAttention] = RunningAttention(decay=DECAY, steps=1)
