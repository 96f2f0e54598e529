"""DeferKV: SnapKV, once the first token of the answer can be asked as well."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from bpkv_trt.config import Regime
from bpkv_trt.policies.observation_window import ObservationWindowPolicy


class DeferKv(ObservationWindowPolicy):
    """The prompt is kept whole until one token has been decoded; its query joins the observation window.

    Source: the published abstract (no code found): prompt window plus first decode query, then one eviction. It is a
    schedule, so regime `deferred` only, and `defer` is 1 unless given. The mean over the window gives the decoded query
    as much weight as each of the M of the prompt; how the original weighs it is not known.
    """

    name: ClassVar[str] = "deferkv"
    source: ClassVar[str] = "DeferKV (abstract)"
    regimes: ClassVar[tuple[Regime, ...]] = ("deferred",)
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType({"defer": 1})
