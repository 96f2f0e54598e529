"""Where time goes: NVTX ranges in the domain `bpkv` for profilers, and a light trace of the same ranges in process."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

try:
    from nvtx import get_domain
except ImportError:  # no wheel for this platform: ranges are only traced in process
    _domain = None
else:
    _domain = get_domain("bpkv")

RangeName = Literal["load", "prefill", "readout", "score", "select", "compact", "decode", "verify"]


@dataclass(frozen=True)
class TraceEvent:
    """One finished range; times in nanoseconds since the trace began."""

    name: RangeName
    start_ns: int
    end_ns: int
    depth: int  # ranges open around it
    payload: int | None  # tokens or entries that the range handled


class Trace:
    """Seconds spent in ranges; with `record` also every range by itself, in order of completion.

    `synchronize` (for example `torch.cuda.synchronize`) is called at both ends of every range, so that a range holds
    the device work it launched; without it, launches are timed.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, record: bool = False) -> None:
        self.events: list[TraceEvent] = []  # stays empty without `record`: a long-lived trace must not grow
        self._record = record
        self._synchronize = synchronize
        self._open: list[RangeName] = []
        self._origin = time.perf_counter_ns()
        self._seconds = dict.fromkeys(get_args(RangeName), 0.0)

    @contextmanager
    def range(self, name: RangeName, payload: int | None = None) -> Iterator[None]:
        """Time a block; ranges may nest, and a block that raises counts as well."""
        if _domain is not None:
            _domain.push_range(_domain.get_event_attributes(message=name, payload=payload))
        self._open.append(name)
        start = self._now()
        try:
            yield
        finally:
            end = self._now()
            self._open.pop()
            if self._record:
                self.events.append(TraceEvent(name, start, end, len(self._open), payload))
            if name not in self._open:  # a range within one of its own name is already counted by the outer one
                self._seconds[name] += (end - start) / 1e9
            if _domain is not None:
                _domain.pop_range()

    def credit(self, name: RangeName, seconds: float) -> None:
        """Count time that was spent before, on what is used again now."""
        self._seconds[name] += seconds

    def _now(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter_ns() - self._origin

    def seconds(self) -> dict[str, float]:
        """Seconds spent in every range, ranges nested in it included; 0.0 for one that never ran."""
        return dict(self._seconds)

    def chrome(self) -> dict[str, Any]:
        """The recorded ranges as a Chrome trace document (chrome://tracing, Perfetto), in microseconds."""
        events = [
            {
                "name": event.name,
                "cat": "bpkv",
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": event.start_ns / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "args": {} if event.payload is None else {"payload": event.payload},
            }
            for event in self.events
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}
