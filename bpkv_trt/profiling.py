"""Where time goes: NVTX ranges in the domain `bpkv` for profilers, and a light trace of the same ranges in process."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

try:
    import nvtx
except ImportError:  # no wheel for this platform: ranges are only traced in process
    nvtx = None

DOMAIN = "bpkv"
RangeName = Literal["load", "prefill", "readout", "score", "select", "compact", "decode", "verify"]
MOST_EVENTS = 1_000_000  # some 200 MB


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One finished range; times in nanoseconds since the trace began."""

    name: RangeName
    start_ns: int
    end_ns: int
    depth: int  # ranges open around it
    payload: int | None  # tokens or entries that the range handled
    thread: int = 0  # the system's number of the one that it ran on


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What the cache took at one moment."""

    time_ns: int
    size: int  # bytes


class Trace:
    """Seconds spent in ranges; with `record` also every range by itself, in order of completion.

    `synchronize` (for example `torch.cuda.synchronize`) is called at both ends of every range, so that a range holds
    the device work it launched; without it, launches are timed. A trace belongs to one thread at a time.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, record: bool = False, most: int = MOST_EVENTS
    ) -> None:
        """most: events that are kept; of more, the older half is forgotten, so that a server's trace has a bound."""
        self.events: list[TraceEvent] = []  # stays empty without `record`: a long-lived trace must not grow
        self.memory: list[MemorySample] = []  # of `cache_bytes`, where it changed
        self.cache_bytes: Callable[[], int] | None = None  # asked at both ends of every recorded range
        self.dropped = 0  # events
        self._record = record
        self._most = most
        self._synchronize = synchronize
        self._open: list[RangeName] = []
        self._origin = time.perf_counter_ns()
        self._seconds = dict.fromkeys(get_args(RangeName), 0.0)

    def range(self, name: RangeName, payload: int | None = None) -> AbstractContextManager[None]:
        """Time a block; ranges may nest, and a block that raises counts as well."""
        return _Range(self, name, payload)

    def credit(self, name: RangeName, seconds: float) -> None:
        """Count time that was spent before, on what is used again now."""
        self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Seconds spent in every range, ranges nested in it included; 0.0 for one that never ran."""
        return dict(self._seconds)

    def weigh(self) -> None:
        """Note what the cache takes now, as at both ends of every recorded range."""
        if self._record:
            self._weigh(self._now())

    def chrome(self) -> dict[str, Any]:
        """The recorded ranges as a Chrome trace document (chrome://tracing, Perfetto), in microseconds.

        One track per thread, a range before those inside it, and the bytes of the cache as a counter.
        """
        process = os.getpid()
        ranges = [
            {
                "name": event.name,
                "cat": DOMAIN,
                "ph": "X",
                "pid": process,
                "tid": event.thread,
                "ts": event.start_ns / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "args": {} if event.payload is None else {"payload": event.payload},
            }
            for event in sorted(self.events, key=lambda event: (event.start_ns, event.depth))
        ]
        memory = [
            {
                "name": "cache",
                "cat": DOMAIN,
                "ph": "C",
                "pid": process,
                "ts": sample.time_ns / 1e3,
                "args": {"bytes": sample.size},
            }
            for sample in self.memory
        ]
        title = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": DOMAIN}}
        return {
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": self.dropped},
            "traceEvents": [title, *ranges, *memory],
        }

    def _enter(self, name: RangeName) -> int:
        start = self._now()
        self._open.append(name)
        if self._record:
            self._weigh(start)
        return start

    def _leave(self, name: RangeName, start: int, payload: int | None) -> None:
        self._open.pop()
        end = self._now()
        if self._record:
            self._weigh(end)
            self.events.append(TraceEvent(name, start, end, len(self._open), payload, threading.get_native_id()))
            if len(self.events) > self._most:
                self._forget()
        if name not in self._open:  # a range within one of its own name is already counted by the outer one
            self._seconds[name] += (end - start) / 1e9

    def _weigh(self, now: int) -> None:
        if self.cache_bytes is not None:
            size = self.cache_bytes()
            if not self.memory or self.memory[-1].size != size:
                self.memory.append(MemorySample(now, size))

    def _forget(self) -> None:
        old = len(self.events) // 2
        self.dropped += old
        del self.events[:old]
        first = self.events[0].start_ns
        self.memory = [sample for sample in self.memory if sample.time_ns >= first]

    def _now(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter_ns() - self._origin


class _Range:
    """One use of `Trace.range`; a class, since a generator would cost more than all that it does."""

    __slots__ = ("_name", "_payload", "_start", "_trace")

    def __init__(self, trace: Trace, name: RangeName, payload: int | None) -> None:
        self._trace, self._name, self._payload = trace, name, payload

    def __enter__(self) -> None:
        if nvtx is not None:  # by the functions that all its versions have; a profiler was attached at the import
            nvtx.push_range(self._name, domain=DOMAIN, payload=self._payload)
        try:
            self._start = self._trace._enter(self._name)
        except BaseException:
            if nvtx is not None:
                nvtx.pop_range(DOMAIN)
            raise

    def __exit__(self, *failure: object) -> None:
        try:
            self._trace._leave(self._name, self._start, self._payload)
        finally:
            if nvtx is not None:
                nvtx.pop_range(DOMAIN)
