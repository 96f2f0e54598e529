"""A launch of a kernel: run, or kept as what has to be compiled ahead of time. Which of them is decided here alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bpkv_trt.kernels.language import NamedKernel, interprets, tl

if TYPE_CHECKING:
    from triton.runtime import JITFunction


@dataclass(frozen=True)
class Launch:
    """One kernel with everything that it is launched with."""

    kernel: "JITFunction | NamedKernel"
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # in the kernel's order, before its constants: tensors, numbers, or None
    constants: Mapping[str, Any]  # compile-time ones
    warps: int
    stages: int  # of loops that overlap loads with products


class Launcher(Protocol):
    """What runs kernels in Triton's place, such as `CompiledKernels`."""

    def launch(self, launch: Launch) -> None: ...


def run_by_triton(launch: Launch) -> None:
    """Compile it for the current device, unless that was done before, and run it there; or interpret it on the CPU.

    Raises ValueError for tensors on `meta`, which have no memory, ConfigError where Triton is not installed.
    """
    name = launch.kernel.__name__
    if launch.arguments[0].is_meta:
        raise ValueError(f"{name} has tensors on meta; expected only within `recorded`, where nothing runs.")
    constants = _interpretable(launch.constants) if interprets() else launch.constants
    launch.kernel[launch.grid](*launch.arguments, **constants, num_warps=launch.warps, num_stages=launch.stages)


_run: ContextVar[Callable[[Launch], None]] = ContextVar("run", default=run_by_triton)


def launch(
    kernel: "JITFunction", grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 3, **constants: Any
) -> None:
    """Run a kernel by Triton on the current device, or as `launched_by` says; within `recorded` it is only noted.

    All tensors are where the first argument is. Raises what runs it does.
    """
    _run.get()(Launch(kernel, grid, arguments, constants, warps, stages))


@contextmanager
def launched_by(kernels: Launcher) -> Iterator[None]:
    """Have kernels run by these, in this thread (or task) only, pools for kernels that are made in it among them."""
    token = _run.set(kernels.launch)
    try:
        yield
    finally:
        _run.reset(token)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note what would be launched, for tensors of any device: those of `meta` take no memory."""
    notes: list[Launch] = []
    token = _run.set(notes.append)
    try:
        yield notes
    finally:
        _run.reset(token)


def launches_by_triton() -> bool:
    """Whether a kernel launched now would be run by Triton."""
    return _run.get() is run_by_triton


def _interpretable(constants: Mapping[str, Any]) -> dict[str, Any]:
    # Types of a product's operands become fp32: the interpreter's product of bf16 is wrong.
    return {name: tl.float32 if isinstance(value, tl.dtype) else value for name, value in constants.items()}
