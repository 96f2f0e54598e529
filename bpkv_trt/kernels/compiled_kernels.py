"""Kernels compiled ahead of time, launched in Triton's place: `with launched_by(CompiledKernels.read(path))`."""

import ctypes
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from bpkv_trt.errors import BpkvError, InputError
from bpkv_trt.kernels.bundle import BundledKernel, unpack, unsealed
from bpkv_trt.kernels.cuda_driver import CudaDriver
from bpkv_trt.kernels.launch import Launch
from bpkv_trt.kernels.target import Target, choose_target
from bpkv_trt.kernels.variant import ALIGNMENT, Identity, Variant, is_aligned

INT32 = range(-(2**31), 2**31)
REBUILD = "build the engine again, with this version of bpkv-trt"
_C_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}  # of numbers; all others are pointers


class CompiledKernels:
    """The kernels of a bundle. Each is loaded on a GPU when it is first launched there; threads may share them.

    They launch what the launchers of this package ask for, as Triton would: on torch's current stream of the tensors'
    GPU. Triton need not be installed, cuda-python has to be.
    """

    def __init__(self, bundle: bytes, called: str = "compiled kernels") -> None:
        """called: where they are from, for messages. Raises InputError for bytes that are no bundle."""
        try:
            _, kernels = unpack(bundle)
            for kernel in kernels:
                Target.parse(kernel.target)
        except ValueError as reason:
            raise InputError(f"The {called} cannot be used: {reason}; {REBUILD}.") from None
        self._by_target: dict[str, dict[Identity, BundledKernel]] = {kernel.target: {} for kernel in kernels}
        for kernel in kernels:
            self._by_target[kernel.target][kernel.identity] = kernel
        self._called = called
        self._driver: CudaDriver | None = None
        self._devices: dict[int, _Device] = {}
        self._lock = Lock()

    @classmethod
    def read(cls, path: Path) -> "CompiledKernels":
        """From a file, as `bundle.sealed` makes it. Raises InputError where it is missing, damaged or another's."""
        try:
            bundle = unsealed(path.read_bytes())
        except OSError as problem:
            raise InputError(
                f"The compiled kernels {path} cannot be read ({problem.strerror}); keep the file beside its engine, or "
                f"{REBUILD}."
            ) from None
        except ValueError as reason:
            raise InputError(f"The compiled kernels {path} are damaged: {reason}; {REBUILD}.") from None
        return cls(bundle, f"compiled kernels {path}")

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self._by_target)

    def launch(self, launch: Launch) -> None:
        """Run a kernel on the current stream of its tensors' GPU. What is refused is not launched.

        Raises BpkvError where there is no kernel for these arguments or this GPU, or the driver refuses; ValueError
        for tensors that a kernel cannot take.
        """
        device, stream = current_stream(_device_of(launch))
        self._device(device).launch(launch, stream)

    def unload(self) -> None:
        """Free what is loaded on GPUs, as the end of this object does; no work of it may be left there."""
        with self._lock:
            self._devices.clear()

    def _device(self, ordinal: int) -> "_Device":
        with self._lock:
            if ordinal not in self._devices:
                self._driver = self._driver or CudaDriver()
                self._devices[ordinal] = _Device(self._driver, ordinal, self._kernels_for(self._driver, ordinal))
            return self._devices[ordinal]

    def _kernels_for(self, driver: CudaDriver, ordinal: int) -> Mapping[Identity, BundledKernel]:
        major, minor = driver.capability(ordinal)
        target = choose_target(self._by_target, (major, minor))
        if target is None:
            targets = ", ".join(self.targets) or "nothing"
            raise BpkvError(
                f"The {self._called} have none for GPU {ordinal}, of compute capability {major}.{minor}: they are "
                f"compiled for {targets}. Build the engine for this GPU too: --bpkv_targets."
            )
        return self._by_target[target]


class Stream(NamedTuple):
    """A stream of CUDA, and the GPU that it is of."""

    device: int
    handle: int


def current_stream(device: torch.device) -> Stream:
    """Torch's, in this thread. Raises ValueError for what is no GPU."""
    if device.type != "cuda":
        raise ValueError(f"a kernel has tensors on {device}; compiled ones run on a GPU.")
    stream = torch.cuda.current_stream(device)
    return Stream(stream.device_index, stream.cuda_stream)


class _Loaded(NamedTuple):
    function: Any
    kernel: BundledKernel
    c_types: tuple[Any, ...]


class _Device:
    """The kernels of one GPU's target, on it."""

    def __init__(self, driver: CudaDriver, ordinal: int, kernels: Mapping[Identity, BundledKernel]) -> None:
        self._driver, self._ordinal, self._kernels = driver, ordinal, kernels
        self._context = driver.primary_context(ordinal)
        self._loaded: dict[Variant, _Loaded] = {}
        self._libraries: list[tuple[Any, BundledKernel]] = []  # with their images, which the driver reads on
        self._lock = Lock()
        weakref.finalize(self, _unload, driver, self._libraries).atexit = False  # the driver may have gone by then

    def launch(self, launch: Launch, stream: int) -> None:
        with self._driver.current(self._context):
            function, kernel, c_types = self._load(Variant.of(launch))
            values = [*_values(launch, kernel), *[0] * kernel.hidden_arguments]
            x, y, z = (*launch.grid, 1, 1)[:3]
            self._driver.launch(function, (x, y, z), kernel.threads, kernel.shared_bytes, stream, values, c_types)

    def _load(self, variant: Variant) -> _Loaded:
        with self._lock:
            if variant not in self._loaded:
                kernel = self._kernels.get(variant.identity)
                if kernel is None:
                    raise BpkvError(_no_kernel(variant, self._kernels))
                library = self._driver.load(kernel.image)
                self._libraries.append((library, kernel))
                function = self._driver.function(library, kernel.name, kernel.shared_bytes, self._ordinal)
                kinds = [kind for _, kind in kernel.arguments] + ["hidden"] * kernel.hidden_arguments
                c_types = tuple(_C_TYPES.get(kind, ctypes.c_void_p) for kind in kinds)
                self._loaded[variant] = _Loaded(function, kernel, c_types)
            return self._loaded[variant]


def _unload(driver: CudaDriver, libraries: list[tuple[Any, BundledKernel]]) -> None:
    for library, _ in libraries:
        driver.unload(library)


def _device_of(launch: Launch) -> torch.device:
    tensors = [each for each in launch.arguments if isinstance(each, torch.Tensor)]
    devices = {each.device for each in tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{launch.kernel.__name__} has tensors on {names}; expected all on one GPU.")
    return devices.pop()


def _values(launch: Launch, kernel: BundledKernel) -> list[int | float]:
    """Addresses and numbers, as the compiled kernel takes them: without what is absent."""
    present = [each for each in launch.arguments if each is not None]
    return [_value(each, name, kind) for each, (name, kind) in zip(present, kernel.arguments, strict=True)]


def _value(argument: Any, name: str, kind: str) -> int | float:
    if isinstance(argument, torch.Tensor):
        address = argument.data_ptr()
        if address % ALIGNMENT and is_aligned(name, kind):
            raise ValueError(
                f"{name} does not begin at a multiple of {ALIGNMENT} bytes, as compiled kernels read it; give a copy."
            )
        return address
    if kind == "i32" and argument not in INT32:
        raise ValueError(f"{name} is {argument}; compiled kernels count in 32 bits.")
    number: int | float = argument
    return number


def _no_kernel(variant: Variant, known: Mapping[Identity, BundledKernel]) -> str:
    wanted = variant.identity
    constants = ", ".join(f"{name}={value}" for name, value in sorted(wanted.constants))
    types = ", ".join(f"{name} {kind}" for name, kind in wanted.arguments)
    others = sum(identity.name == wanted.name for identity in known)
    return (
        f"There is no compiled kernel {wanted.name} of {wanted.threads} threads for {constants} and arguments {types}; "
        f"there are {others} others of this name. The engine's kernels are of another model, cache or number of "
        f"positions, or of another version of bpkv-trt; {REBUILD}."
    )
