"""SnapKV: what the last tokens of the prompt attend to."""

from typing import ClassVar

from bpkv_trt.policies.observation_window import ObservationWindowPolicy


class SnapKv(ObservationWindowPolicy):
    """The pooled attention of the observation window, as it is; every head keeps as much.

    Source: Li et al., arXiv:2404.14469; kvpress SnapKVPress 0.5.5. What differs: see `ObservationWindowPolicy`.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "arXiv:2404.14469"
