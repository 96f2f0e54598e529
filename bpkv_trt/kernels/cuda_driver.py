"""CUDA's driver, as far as launching compiled kernels takes it, through cuda-python."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from bpkv_trt.errors import BpkvError
from bpkv_trt.kernels.target import Capability

SHARED_BYTES_WITHOUT_ASKING = 48 * 1024


class CudaDriver:
    """Every call raises BpkvError where the driver refuses it, with the driver's name of the error."""

    def __init__(self) -> None:
        """Raises BpkvError where cuda-python or the driver is missing."""
        self._api = _api()
        self._call("cuInit", 0)

    def capability(self, device: int) -> Capability:
        """Compute capability."""
        names = self._api.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        return major, minor

    def primary_context(self, device: int) -> Any:
        """The one that torch, and TensorRT's runtime, work in."""
        return self._call("cuDevicePrimaryCtxRetain", device)

    @contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """Have this thread work in a context. A new thread is in none, and torch may have left it in another GPU's."""
        if int(self._call("cuCtxGetCurrent")) == int(context):
            yield
            return
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def load(self, image: bytes) -> Any:
        """A library; the image has to live as long."""
        return self._call("cuLibraryLoadData", image, None, None, 0, None, None, 0)

    def unload(self, library: Any) -> None:
        self._call("cuLibraryUnload", library)

    def function(self, library: Any, name: str, shared_bytes: int, device: int) -> Any:
        """A kernel of a library as it is launched, allowed to take so much dynamic shared memory on this device."""
        kernel = self._call("cuLibraryGetKernel", library, name.encode())
        if shared_bytes > SHARED_BYTES_WITHOUT_ASKING:
            attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuKernelSetAttribute", attribute, shared_bytes, kernel, device)
        return self._call("cuKernelGetFunction", kernel)

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        values: Sequence[int | float],
        types: Sequence[Any],
    ) -> None:
        """On a stream of the current context. types: of ctypes, by argument."""
        arguments = tuple(values), tuple(types)
        self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, stream, arguments, 0)

    def _call(self, function: str, *arguments: Any) -> Any:
        """What it gives beside its result, if anything."""
        try:
            result, *given = getattr(self._api, function)(*arguments)
        except RuntimeError as problem:  # there is no driver, or it is older than the function
            raise BpkvError(
                f"CUDA's driver cannot be used ({problem}); run on a machine with an NVIDIA GPU and a driver for CUDA "
                "12 or later, in a container started with access to it."
            ) from None
        if result != self._api.CUresult.CUDA_SUCCESS:
            _, words = self._api.cuGetErrorString(result)
            raise BpkvError(
                f"{function} failed with {result.name}: {words.decode() if words else 'unknown'}. Run once with "
                "CUDA_LAUNCH_BLOCKING=1 if it may come from earlier work."
            )
        return given[0] if given else None


def _api() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        if error.name not in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
            raise
        raise BpkvError(
            "Compiled kernels are launched through cuda-python, which is not installed; "
            "pip install 'cuda-bindings>=12.8'."
        ) from None
    module: ModuleType = driver
    return module
