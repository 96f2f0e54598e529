"""The kernels that a session runs beside its engine, compiled for it and kept in a file of its folder."""

from collections.abc import Sequence
from pathlib import Path

from bpkv_trt.documents import write_whole
from bpkv_trt.kernels.aot import TARGETS
from bpkv_trt.kernels.bundle import sealed
from bpkv_trt.kernels.configuration import KernelConfiguration, session_launches
from bpkv_trt.trtllm.kernel_bundle import KernelBundle, compile_bundle


class SessionKernels(KernelBundle):
    """As `kernels.compiled_kernels.CompiledKernels` launches them."""

    def write(self, path: Path) -> None:
        """The file that `CompiledKernels.read` takes, whole or not at all. Raises OSError."""
        write_whole(path, sealed(self.bundle))


def compile_session_kernels(
    configuration: KernelConfiguration, targets: Sequence[str] = tuple(TARGETS), cache: Path | None = None
) -> SessionKernels:
    """Targets, cache and errors are those of `compile_bundle`."""
    return compile_bundle(SessionKernels, configuration, session_launches(configuration), targets, cache)
