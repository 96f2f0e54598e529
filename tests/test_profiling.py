"""The trace against a clock that the test moves by hand."""

import json
import pickle
import threading
import time
from collections.abc import Callable

import pytest

from bpkv_trt import profiling
from bpkv_trt.profiling import Trace


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    now = [0]

    def pass_seconds(seconds: int) -> None:
        now[0] += seconds * 10**9

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return pass_seconds


def test_nested_ranges_count_in_both_and_recursion_once(wait: Callable[[int], None]) -> None:
    trace = Trace(record=True)
    with trace.range("prefill", payload=1000):
        wait(1)
        with trace.range("readout"):
            wait(2)
        with trace.range("prefill"):
            wait(4)
    with trace.range("readout"):
        wait(8)
    seconds = trace.seconds()
    assert (seconds["prefill"], seconds["readout"], seconds["decode"]) == (7.0, 10.0, 0.0)
    assert list(seconds) == ["load", "prefill", "readout", "score", "select", "compact", "decode", "verify"]
    assert [(event.name, event.depth, event.payload) for event in trace.events] == [
        ("readout", 1, None),
        ("prefill", 1, None),
        ("prefill", 0, 1000),
        ("readout", 0, None),
    ]


def test_a_range_that_raises_is_recorded_and_closed(wait: Callable[[int], None]) -> None:
    trace = Trace(record=True)
    with pytest.raises(KeyError), trace.range("prefill"), trace.range("score"):
        wait(3)
        raise KeyError("inside")
    with trace.range("select"):
        wait(1)
    assert [(event.name, event.depth) for event in trace.events] == [("score", 1), ("prefill", 0), ("select", 0)]
    assert trace.seconds()["score"] == trace.seconds()["prefill"] == 3.0


def test_traces_are_independent(wait: Callable[[int], None]) -> None:
    first, second = Trace(record=True), Trace(record=True)
    with first.range("decode"), second.range("decode"):
        wait(1)
    assert first.events[0].depth == second.events[0].depth == 0
    assert Trace(record=True).events == []


def test_a_trace_that_is_not_asked_to_record_never_grows(wait: Callable[[int], None]) -> None:
    trace = Trace()

    def one_range() -> int:
        with trace.range("decode", payload=1):
            wait(1)
        return len(pickle.dumps(vars(trace)))

    first = one_range()
    assert {one_range() for _ in range(1000)} == {first}
    assert trace.seconds()["decode"] == 1001.0 and trace.events == []


def test_the_device_is_waited_for_at_both_ends_only_when_asked(wait: Callable[[int], None]) -> None:
    trace = Trace(synchronize=lambda: wait(5))
    with trace.range("score"):
        wait(1)
    assert trace.seconds()["score"] == 6.0, "the work launched before is not in the range, its own is"


def test_chrome_events_nest_in_time_and_carry_payloads(wait: Callable[[int], None]) -> None:
    trace = Trace(record=True)
    with trace.range("prefill", payload=7):
        wait(1)
        with trace.range("readout"):
            wait(1)
    document = json.loads(json.dumps(trace.chrome()))
    outer, inner = (event for event in document["traceEvents"] if event["ph"] == "X")
    assert (outer["name"], outer["ph"], outer["ts"], outer["dur"]) == ("prefill", "X", 0.0, 2e6)
    assert (inner["name"], inner["ts"], inner["dur"]) == ("readout", 1e6, 1e6)
    assert outer["args"] == {"payload": 7} and inner["args"] == {}


def test_the_bytes_of_the_cache_are_noted_where_they_change(wait: Callable[[int], None]) -> None:
    trace, size = Trace(record=True), [10]
    trace.cache_bytes = lambda: size[0]
    with trace.range("prefill"):
        wait(1)
        size[0] = 70
    with trace.range("decode"):
        wait(1)
    with trace.range("compact"):
        wait(1)
        size[0] = 20
    size[0] = 0
    wait(1)
    trace.weigh()
    assert [(sample.time_ns // 10**9, sample.size) for sample in trace.memory] == [(0, 10), (1, 70), (3, 20), (4, 0)]
    counters = [event for event in trace.chrome()["traceEvents"] if event["ph"] == "C"]
    assert [(event["ts"], event["args"]["bytes"]) for event in counters] == [(0, 10), (1e6, 70), (3e6, 20), (4e6, 0)]


def test_a_trace_of_a_server_keeps_the_latest_ranges_alone(wait: Callable[[int], None]) -> None:
    trace, size = Trace(record=True, most=100), [0]
    trace.cache_bytes = lambda: size[0]
    for step in range(1000):
        with trace.range("decode", payload=step):
            wait(1)
            size[0] += 1
    payloads = [event.payload for event in trace.events]
    assert payloads == list(range(1000 - len(payloads), 1000)) and 50 <= len(payloads) <= 100
    assert trace.dropped == 1000 - len(payloads) and len(trace.memory) <= 2 * len(payloads) + 1
    assert trace.chrome()["otherData"] == {"dropped_events": trace.dropped}
    assert trace.seconds()["decode"] == 1000.0, "seconds are those of all"


def test_every_thread_has_a_track(wait: Callable[[int], None]) -> None:
    trace = Trace(record=True)

    def one_range() -> None:
        with trace.range("decode"):
            wait(1)

    thread = threading.Thread(target=one_range)
    thread.start()
    thread.join()
    one_range()
    other, own = (event["tid"] for event in trace.chrome()["traceEvents"] if event["ph"] == "X")
    assert (other, own) == (thread.native_id, threading.get_native_id()) and other != own


def test_of_ranges_that_begin_together_the_outer_one_comes_first(wait: Callable[[int], None]) -> None:
    trace = Trace(record=True)
    with trace.range("prefill"), trace.range("score"), trace.range("select"):
        wait(1)
    ranges = [event["name"] for event in trace.chrome()["traceEvents"] if event["ph"] == "X"]
    assert ranges == ["prefill", "score", "select"]


def test_a_device_that_fails_leaves_trace_and_profiler_usable(
    wait: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = _Nvtx()
    monkeypatch.setattr(profiling, "nvtx", profiler)
    broken = [False]

    def synchronize() -> None:
        if broken[0]:
            raise RuntimeError("CUDA error")

    trace = Trace(synchronize, record=True)
    with pytest.raises(RuntimeError), trace.range("prefill"):
        broken[0] = True
    with pytest.raises(RuntimeError), trace.range("score"):
        pass
    broken[0] = False
    with trace.range("decode"):
        wait(1)
    assert [(event.name, event.depth) for event in trace.events] == [("decode", 0)]
    assert profiler.calls == [("prefill", None), "pop", ("score", None), "pop", ("decode", None), "pop"]


class _Nvtx:
    """Records what the package nvtx is told, in order."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def push_range(self, message: str, domain: str, payload: int | None) -> None:
        assert domain == "bpkv"
        self.calls.append((message, payload))

    def pop_range(self, domain: str) -> None:
        assert domain == "bpkv"
        self.calls.append("pop")


def test_profilers_see_balanced_ranges_with_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = _Nvtx()
    monkeypatch.setattr(profiling, "nvtx", profiler)
    trace = Trace(record=True)
    with pytest.raises(ValueError), trace.range("score", payload=12), trace.range("select"):
        raise ValueError
    assert profiler.calls == [("score", 12), ("select", None), "pop", "pop"]
    monkeypatch.setattr(profiling, "nvtx", None)
    with trace.range("compact"):
        pass
    assert trace.events[-1].name == "compact", "without the nvtx package the trace goes on"
