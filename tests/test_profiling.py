"""The trace against a clock that the test moves by hand."""

import json
import pickle
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
    inner, outer = document["traceEvents"]
    assert (outer["name"], outer["ph"], outer["ts"], outer["dur"]) == ("prefill", "X", 0.0, 2e6)
    assert (inner["name"], inner["ts"], inner["dur"]) == ("readout", 1e6, 1e6)
    assert outer["args"] == {"payload": 7} and inner["args"] == {}


class _Domain:
    """Records what the NVTX domain is told, in order."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def get_event_attributes(self, message: str, payload: int | None) -> tuple[str, int | None]:
        return message, payload

    def push_range(self, attributes: object) -> None:
        self.calls.append(attributes)

    def pop_range(self) -> None:
        self.calls.append("pop")


def test_profilers_see_balanced_ranges_with_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = _Domain()
    monkeypatch.setattr(profiling, "_domain", domain)
    trace = Trace(record=True)
    with pytest.raises(ValueError), trace.range("score", payload=12), trace.range("select"):
        raise ValueError
    assert domain.calls == [("score", 12), ("select", None), "pop", "pop"]
    monkeypatch.setattr(profiling, "_domain", None)
    with trace.range("compact"):
        pass
    assert trace.events[-1].name == "compact", "without the nvtx package the trace goes on"
