"""A launch of a kernel: run, or kept as what has to be compiled ahead of time. Both know it from one place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from triton.runtime import JITFunction

_recording: ContextVar["list[Launch] | None"] = ContextVar("recording", default=None)


@dataclass(frozen=True)
class Launch:
    """One kernel with everything that it is launched with."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # in the kernel's order, before its constants: tensors, numbers, or None
    constants: Mapping[str, Any]  # compile-time ones
    warps: int
    stages: int  # of loops that overlap loads with products


def launch(
    kernel: JITFunction, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 3, **constants: Any
) -> None:
    """Run a kernel on the current device; within `recorded` nothing runs and it is noted instead.

    Raises ValueError for tensors on `meta`, which have no memory, if it is to run. All are where the first argument is.
    """
    notes = _recording.get()
    if notes is not None:
        notes.append(Launch(kernel, grid, arguments, constants, warps, stages))
    elif arguments[0].is_meta:
        raise ValueError(f"{kernel.__name__} has tensors on meta; expected only within `recorded`, where nothing runs.")
    else:
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note what would be launched, for tensors of any device: those of `meta` take no memory."""
    notes: list[Launch] = []
    token = _recording.set(notes)
    try:
        yield notes
    finally:
        _recording.reset(token)
