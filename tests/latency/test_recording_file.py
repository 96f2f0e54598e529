"""What is no recording is told as what it is, in one sentence that says what to do."""

import gzip
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from bpkv_trt.errors import InputError
from bpkv_trt.latency.recording import NoRanges
from bpkv_trt.latency.recording_file import read_recording
from bpkv_trt.profiling import Trace
from bpkv_trt.trace_file import trace_document
from tests.latency.nsys_export import Launch, Range, write_export

RANGES = [Range("prefill", 0, 900, payload=12), *(Range("decode", 1000 + at, 1001 + at) for at in range(0, 4000, 2))]


def refused(path: Path, error: type[InputError] = InputError) -> str:
    with pytest.raises(error) as refusal:
        read_recording(path, "bpkv")
    assert str(path) in str(refusal.value)
    return str(refusal.value)


def event(**changed: object) -> dict[str, object]:
    return {"name": "decode", "cat": "bpkv", "ph": "X", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2, "args": {}} | changed


def test_a_trace_reads_back_as_it_was_recorded(tmp_path: Path) -> None:
    trace = Trace(record=True)
    trace.cache_bytes = lambda: 4096
    with trace.range("prefill", payload=100), trace.range("readout"):
        pass
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace_document(trace)))
    found = read_recording(path, "bpkv")
    expected = [("prefill", 100), ("readout", None)]
    assert [(span.name, span.payload) for span in found.spans] == expected
    events = sorted(trace.events, key=lambda event: event.depth)
    assert [(span.start_ns, span.end_ns) for span in found.spans] == [(each.start_ns, each.end_ns) for each in events]
    assert found.memory == trace.memory and [sample.size for sample in found.memory] == [4096]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty", "Record it again"]),
        (b'{"traceEvents": [{"name": "pre', ["cut off or damaged"]),
        (gzip.compress(b"{}", mtime=0), ["cut off or damaged"]),
        (b"SQLite format 3\0", ["cut off or damaged", "nsys export"]),
        (b"[" * 100_000, ["cut off or damaged"]),
        (b"[1, 2]", ["no trace", "traceEvents"]),
        (b'{"text": "a report"}', ["no trace", "traceEvents"]),
        (b'{"traceEvents": {"a": 1}}', ["no trace"]),
        (b'{"traceEvents": [1]}', ["no trace"]),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    message = refused(path)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ts": None}, "event 1 has no number as ts"),
        ({"ts": True}, "event 1 has no number as ts"),
        ({"ts": float("nan")}, "event 1 has no number as ts"),
        ({"ts": 1e306}, "event 1 has no number as ts"),
        ({"ts": -(10**400)}, "event 1 has no number as ts"),
        ({"dur": 1e308}, "event 1 has no number as dur"),
        ({"dur": float("inf")}, "event 1 has no number as dur"),
        ({"dur": -1}, "event 1 ends before it begins"),
        ({"name": 3}, "event 1 has no name"),
        ({"tid": "main"}, "event 1 has no tid"),
        ({"args": {"payload": "x"}}, "event 1 has no number as payload"),
        ({"args": {"payload": 10**400}}, "event 1 has no number as payload"),
        ({"ph": "C", "args": {"bytes": 1e308}}, "event 1 has no number as bytes"),
        ({"ph": "C", "args": {"bytes": None}}, "event 1 has no number as bytes"),
    ],
)
def test_a_damaged_event_is_named(tmp_path: Path, changed: dict[str, object], words: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event(), event(**changed)]}))
    assert words in refused(path)


def test_the_trace_of_another_tool_is_told_by_its_categories(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event(cat="cpu_op"), event(cat="kernel")]}))
    message = refused(path, NoRanges)
    assert "no ranges of bpkv" in message and "cpu_op, kernel" in message and "bpkv generate --trace" in message


@pytest.mark.parametrize("kind", ["B", "Q", 7, None])
def test_a_trace_whose_events_do_not_last_is_not_told_to_be_another_s(tmp_path: Path, kind: object) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event(ph=kind)]}))
    message = refused(path, NoRanges)
    assert 'none that last ("ph": "X")' in message and "another tool" not in message


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE bookmarks (name TEXT)")


def without_domain(path: Path) -> None:
    write_export(path, [Range("prefill", 0, 5, domain="lmcache")])


def without_nvtx(path: Path) -> None:
    write_export(path, [], [Launch("gemm", 1, 2, 3)])


def never_finished(path: Path) -> None:
    write_export(path, [Range("prefill", 0, None)])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (other_database, ["no export of Nsight Systems", "bookmarks"]),
        (without_domain, ["2022.4.2.1", "no finished NVTX ranges of the domain bpkv", "nvtx==0.2.11"]),
        (without_nvtx, ["no finished NVTX ranges of the domain bpkv"]),
        (never_finished, ["no finished NVTX ranges of the domain bpkv"]),
    ],
)
def test_another_database_is_refused(tmp_path: Path, write: Callable[[Path], None], words: list[str]) -> None:
    path = tmp_path / "trace.sqlite"
    write(path)
    message = refused(path)
    assert all(word in message for word in words), message


def test_every_cut_of_an_export_is_refused_or_whole(tmp_path: Path) -> None:
    content = write_export(tmp_path / "whole.sqlite", RANGES, [Launch("gemm", 5, 6, 7)]).read_bytes()
    path = tmp_path / "cut.sqlite"
    for length in range(16, len(content), 1999):
        path.write_bytes(content[:length])
        assert "cut off or damaged" in refused(path) or "no export" in refused(path)


def test_a_report_that_only_nsys_reads_and_no_file_at_all(tmp_path: Path) -> None:
    report = tmp_path / "trace.nsys-rep"
    report.write_bytes(b"x")
    assert "nsys export --type sqlite" in refused(report)
    assert "does not exist" in refused(tmp_path / "nothing.json")
