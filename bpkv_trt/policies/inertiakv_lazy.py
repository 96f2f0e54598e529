"""InertiaKV, refreshed only now and then."""

from typing import ClassVar

from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.policies.inertiakv import DECAY, InertiaKv

REFRESH = 8  # decode steps; a refresh falls on the end of the default `defer` and `interval`


class InertiaKvLazy(InertiaKv):
    """Score: InertiaKV's, with only every 8th decode step's attention looked at: s <- 0.9^8 s + (1 - 0.9^8) a_t.

    Source: the abstract of InertiaKV (2026), its variant Lazy. Ours: the period, and that an attention seen is taken to
    have lasted the 8 steps since the last one, so that scores forget as fast as InertiaKV's. Entries younger than the
    last refresh have the mean score of their head until the next.
    """

    name: ClassVar[str] = "inertiakv_lazy"
    running_attention: ClassVar[RunningAttention] = RunningAttention(decay=DECAY, every=REFRESH)
