"""What a server counts, as plain numbers under the names that it is monitored by."""

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from bpkv_trt.runtime.event import CompactionEvent

OUTCOMES = ("stop", "length", "cancelled", "timeout", "error", "refused")
REQUESTS = "bpkv_requests_total"
COUNTERS = {
    "bpkv_prompt_tokens_total": "tokens of prompts that were run to their end",
    "bpkv_generated_tokens_total": "tokens of answers",
    "bpkv_entries_evicted_total": "cache entries evicted",
    "bpkv_bytes_freed_total": "bytes of pages that compactions freed",
    "bpkv_fallbacks_total": "compactions that did not happen because scores were NaN or Inf",
}
GAUGES = {
    "bpkv_pages_free": "pages of the pool that nobody owns",
    "bpkv_pages_live": "pages of the pool that requests own",
    "bpkv_queue_length": "requests that wait to be admitted, or are being encoded",
    "bpkv_running": "requests that run",
    "bpkv_healthy": "1 where the loop runs and its last step did not fail for all",
}
HISTOGRAMS = {
    "bpkv_compression_seconds": "time that one compaction took",
    "bpkv_time_to_first_token_seconds": "from a request's submission to its first token",
    "bpkv_time_per_output_token_seconds": "mean time between the tokens of an answer",
}
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


@dataclass(frozen=True)
class Histogram:
    """Observations counted by the bound that each is at most: one count more than bounds, the last for those above."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """All observations."""
        return sum(self.counts)

    def with_one(self, value: float) -> "Histogram":
        """The same with a further observation."""
        place = bisect_left(self.bounds, value)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return Histogram(self.bounds, counts, self.sum + value)


@dataclass(frozen=True)
class Snapshot:
    """All families at one moment, by name."""

    requests: dict[str, int]  # REQUESTS, by outcome
    counters: dict[str, int]
    gauges: dict[str, int]
    histograms: dict[str, Histogram]


class ServingMetrics:
    """Counters, gauges and histograms; any thread may read them.

    `observed` is called with the name and the value of every observation of a histogram, for a monitor that keeps
    histograms of its own.
    """

    def __init__(self, observed: Callable[[str, float], None] | None = None) -> None:
        self._observed = observed
        self._lock = threading.Lock()
        self._requests = dict.fromkeys(OUTCOMES, 0)
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._gauges = dict.fromkeys(GAUGES, 0)
        self._histograms = {name: Histogram(BOUNDS, (0,) * (len(BOUNDS) + 1), 0.0) for name in HISTOGRAMS}

    def snapshot(self) -> Snapshot:
        """All of them at one moment."""
        with self._lock:
            return Snapshot(dict(self._requests), dict(self._counters), dict(self._gauges), dict(self._histograms))

    def ended(self, outcome: str) -> None:
        """A request came to its end, or was refused."""
        with self._lock:
            self._requests[outcome] += 1

    def add(self, name: str, count: int) -> None:
        """Raise a counter."""
        with self._lock:
            self._counters[name] += count

    def set(self, **gauges: int) -> None:
        """Set gauges, named without the prefix."""
        with self._lock:
            for name, value in gauges.items():
                assert f"bpkv_{name}" in self._gauges
                self._gauges[f"bpkv_{name}"] = value

    def observe(self, name: str, seconds: float) -> None:
        """Count an observation of a histogram."""
        with self._lock:
            self._histograms[name] = self._histograms[name].with_one(seconds)
        if self._observed is not None:
            self._observed(name, seconds)

    def compacted(self, event: CompactionEvent) -> None:
        """A compaction was done, or was not."""
        if event.broken_scores:
            self.add("bpkv_fallbacks_total", 1)
        if event.seconds:
            self.add("bpkv_entries_evicted_total", event.entries_before - event.entries_after)
            self.add("bpkv_bytes_freed_total", event.bytes_before - event.bytes_after)
            self.observe("bpkv_compression_seconds", sum(event.seconds.values()))
