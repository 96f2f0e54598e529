"""The kernels that a session runs beside its engine, compiled for it and kept in a file of its folder."""

from collections.abc import Sequence
from pathlib import Path

from bpkv_trt.documents import write_whole
from bpkv_trt.errors import InputError
from bpkv_trt.kernels.aot import TARGETS
from bpkv_trt.kernels.bundle import sealed
from bpkv_trt.kernels.configuration import KernelConfiguration, session_launches
from bpkv_trt.trtllm.kernel_bundle import KernelBundle, compile_bundle
from bpkv_trt.trtllm.sidecar import KERNELS


class SessionKernels(KernelBundle):
    """As `kernels.compiled_kernels.CompiledKernels` launches them."""

    def write(self, engine: Path) -> None:
        """Beside an engine, as `CompiledKernels.read` takes them. Raises InputError where that cannot be."""
        try:
            write_whole(engine / KERNELS, sealed(self.bundle))
        except OSError as error:
            raise InputError(f"The kernels cannot be written to {engine / KERNELS} ({error.strerror}).") from None


def compile_session_kernels(
    configuration: KernelConfiguration, targets: Sequence[str] = tuple(TARGETS), cache: Path | None = None
) -> SessionKernels:
    """Targets, cache and errors are those of `compile_bundle`."""
    return compile_bundle(SessionKernels, configuration, session_launches(configuration), targets, cache)
