"""RippleKV: layers keep as much as noise in their values would change the output."""

from typing import ClassVar

from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.snapkv import SnapKv


class RippleKv(SnapKv):
    """Score: SnapKV's, under a layer table of measured sensitivities, which `bpkv layer-table` writes for a model.

    Source: the abstract of RippleKV (2026): noise in each layer's values, output KL, an exponential map, layer
    multipliers. No code was to be found; how the noise, the map and the text are chosen is ours, and stands in
    `bpkv_trt.evaluation.layer_sensitivity`. The scorer inside a layer is SnapKV's.
    """

    name: ClassVar[str] = "ripplekv"
    source: ClassVar[str] = "RippleKV (2026), abstract"
    requires: ClassVar[frozenset[Requirement]] = SnapKv.requires | {"score_table"}
