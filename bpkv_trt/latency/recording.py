"""What a profiler or a trace saw, whichever it was."""

from dataclasses import dataclass, field
from typing import NamedTuple

from bpkv_trt.errors import InputError
from bpkv_trt.profiling import MemorySample


class NoRanges(InputError):
    """A recording that can be read, without a range of the domain that was asked for."""


class Track(NamedTuple):
    """One thread of one process; ranges of one track are inside or beside one another."""

    process: int
    thread: int


@dataclass(frozen=True, slots=True)
class Span:
    """One range, in nanoseconds of the recording's clock."""

    name: str
    start_ns: int
    end_ns: int
    track: Track
    payload: float | None = None  # tokens or entries


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on a GPU, and when and where it was launched."""

    name: str
    start_ns: int
    end_ns: int
    launched_ns: int
    track: Track


@dataclass(frozen=True)
class Recording:
    """Ranges of one domain, and what ran on a GPU and in memory meanwhile."""

    made_by: str
    spans: list[Span]
    kernels: list[Kernel] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
