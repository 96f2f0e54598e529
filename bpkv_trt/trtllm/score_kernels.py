"""The kernels that score inside an engine, compiled for it."""

from collections.abc import Sequence
from pathlib import Path

from bpkv_trt.kernels.aot import TARGETS
from bpkv_trt.kernels.configuration import KernelConfiguration, score_launches
from bpkv_trt.trtllm.kernel_bundle import KernelBundle, compile_bundle


class ScoreKernels(KernelBundle):
    """As the plugin takes them."""


def compile_score_kernels(
    configuration: KernelConfiguration, targets: Sequence[str] = tuple(TARGETS), cache: Path | None = None
) -> ScoreKernels:
    """Targets, cache and errors are those of `compile_bundle`."""
    return compile_bundle(ScoreKernels, configuration, score_launches(configuration), targets, cache)
