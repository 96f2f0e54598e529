"""The report's numbers on random nested traces, in all formats, against a count of single nanoseconds."""

import json
import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.errors import InputError
from bpkv_trt.latency.nesting import Nesting
from bpkv_trt.latency.recording import Span, Track
from bpkv_trt.latency.report import report_on
from tests.latency.nsys_export import PROCESS, Launch, Range, write_export

NAMES = ("prefill", "readout", "score", "select")
FORMATS = ("chrome", "old nsys", "new nsys")


def random_ranges(seed: int) -> list[Range]:
    """Trees of ranges on two threads, the outer one first; ranges may touch, be equal, or hold nothing."""
    draw = random.Random(seed)
    found: list[Range] = []

    def fill(start: int, end: int, thread: int, depth: int) -> None:
        place = start
        while place < end and draw.random() < 0.8:
            begin = draw.randint(place, end)
            stop = draw.randint(begin, end)
            if stop == begin:
                return
            found.append(Range(draw.choice(NAMES), begin, stop, thread, draw.choice((None, draw.randint(0, 99)))))
            if depth < 4:
                fill(begin, stop, thread, depth + 1)
            place = stop

    for thread in (7, 8):
        fill(0, draw.randint(1, 200), thread, 0)
    return found


def random_launches(seed: int) -> list[Launch]:
    draw = random.Random(seed)
    calls = [draw.randint(0, 210) for _ in range(draw.randint(0, 12))]
    return [Launch(draw.choice("ab"), at, s := at + draw.randint(1, 50), s + draw.randint(0, 9), 7) for at in calls]


def written(folder: Path, form: str, ranges: list[Range], launches: list[Launch]) -> Path:
    if form != "chrome":
        return write_export(folder / "trace.sqlite", ranges, launches, new=form == "new nsys")
    events = [
        {
            "name": each.name, "cat": "bpkv", "ph": "X", "pid": 1, "tid": each.thread, "ts": each.start / 1e3,
            "dur": (each.end - each.start) / 1e3, "args": {} if each.payload is None else {"payload": each.payload},
        }
        for each in sorted(ranges, key=lambda each: (-each.start, each.end))  # of equal ones the outer stays first
        if each.end is not None
    ]  # fmt: skip
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, *events]}))
    return path


def innermost(ranges: list[Range], thread: int, moment: int) -> str | None:
    """The range that began last around a nanosecond; of those that began together the one given last."""
    around = [(each.start, place) for place, each in enumerate(ranges) if each.thread == thread]
    around = [(start, place) for start, place in around if start <= moment < (ranges[place].end or 0)]
    # Ranges are given outer first, so of two around a moment the later one is inside.
    return ranges[max(place for _, place in around)].name if around else None


def expected(ranges: list[Range]) -> dict[str, dict[str, Any]]:
    own = Counter[str]()
    for thread in (7, 8):
        own.update(name for moment in range(201) if (name := innermost(ranges, thread, moment)) is not None)
    lengths = defaultdict[str, list[int]](list)
    for each in ranges:
        assert each.end is not None
        lengths[each.name].append(each.end - each.start)
    return {
        name: {
            "count": len(times),
            "total_ns": sum(times),
            "self_ns": own[name],
            "nested_ns": sum(times) - own[name],
            "share": own[name] / sum(own.values()),
            "payload": sum(each.payload or 0 for each in ranges if each.name == name),
            "p50_ns": float(np.quantile(times, 0.5)),
            "p99_ns": float(np.quantile(times, 0.99)),
        }
        for name, times in lengths.items()
    }


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_number_of_a_range_is_that_of_a_count_by_nanoseconds(form: str, seed: int) -> None:
    ranges = random_ranges(seed)
    if not ranges:
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = report_on(written(Path(folder), form, ranges, []), "bpkv").document["ranges"]
    truth = expected(ranges)
    assert {row["range"] for row in rows} == truth.keys()
    for row in rows:
        for key, value in truth[row["range"]].items():
            assert row[key] == pytest.approx(value, rel=1e-12), (row["range"], key)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert [row["self_ns"] for row in rows] == sorted((row["self_ns"] for row in rows), reverse=True)


@pytest.mark.parametrize("form", FORMATS[1:])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_kernel_counts_for_the_range_that_launched_it(form: str, seed: int) -> None:
    ranges, launches = random_ranges(seed), random_launches(seed)
    if not ranges:
        return
    with tempfile.TemporaryDirectory() as folder:
        document = report_on(written(Path(folder), form, ranges, launches), "bpkv").document
    truth = Counter[tuple[str | None, str]]()
    counts = Counter[tuple[str | None, str]]()
    for each in launches:
        key = innermost(ranges, each.thread, each.call), each.kernel
        truth[key] += each.end - each.start
        counts[key] += 1
    assert {(row["range"], row["kernel"]): row["total_ns"] for row in document["kernels"]} == dict(truth)
    assert {(row["range"], row["kernel"]): row["count"] for row in document["kernels"]} == dict(counts)
    for row in document["ranges"]:
        assert row["kernels_ns"] == sum(time for (name, _), time in truth.items() if name == row["range"])


def test_ranges_that_overlap_are_refused() -> None:
    track = Track(1, 1)
    with pytest.raises(InputError, match="prefill and score of thread 1 overlap"):
        Nesting([Span("prefill", 0, 10, track), Span("score", 5, 11, track)])
    Nesting([Span("prefill", 0, 10, track), Span("score", 5, 11, Track(1, 2))])


def test_domains_and_correlations_are_those_of_a_process(tmp_path: Path) -> None:
    other = PROCESS + (1 << 24)
    ranges = [
        Range("prefill", 10, 50, payload=3),
        Range("prefill", 0, 90, domain="TensorRT-LLM"),
        Range("score", 20, 40, process=other, domain="TensorRT-LLM"),
        Range("select", 20, 45, process=other),
        Range("readout", 60, None),
        Range("verify", 60, 70, kind=60),
    ]
    launches = [Launch("first", 30, 35, 39), Launch("second", 30, 36, 38, process=other)]
    report = report_on(write_export(tmp_path / "two.sqlite", ranges, launches), "bpkv").document
    assert {row["range"]: row["total_ns"] for row in report["ranges"]} == {"prefill": 40, "select": 25}
    assert {(row["range"], row["kernel"]) for row in report["kernels"]} == {("prefill", "first"), ("select", "second")}
    assert report["notes"] == ["1 ranges had not ended when recording did, and are not counted"]
    assert report["made_by"] == "nsys 2022.4.2.1"
    report = report_on(tmp_path / "two.sqlite", "TensorRT-LLM").document
    assert {row["range"] for row in report["ranges"]} == {"prefill", "score"}
