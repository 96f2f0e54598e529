"""Reading Chrome's trace format: what `Trace.chrome` writes."""

import json
from pathlib import Path
from typing import Any

from bpkv_trt.documents import LARGEST_DOCUMENT
from bpkv_trt.errors import InputError
from bpkv_trt.input_file import read_file
from bpkv_trt.latency.recording import NoRanges, Recording, Span, Track
from bpkv_trt.profiling import MemorySample

LARGEST = 2**53  # of times, in microseconds, of payloads and of bytes: from there on numbers of JSON are not exact


def read_chrome(path: Path, domain: str) -> Recording:
    """The ranges of the category `domain`, and the cache's bytes. Raises InputError for what is no such trace."""
    content = read_file(path, LARGEST_DOCUMENT, "trace", "bpkv profile report")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(
            f"The trace {path} is cut off or damaged: it is no JSON{where}, and no SQLite file either. Record it "
            "again, or copy it again."
        ) from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InputError(
            f"The file {path} is JSON, but no trace: it has no list traceEvents of objects. Give a trace of bpkv, an "
            "SQLite export of Nsight Systems, or a results folder of `bpkv profile run`."
        )
    own = [(place, event) for place, event in enumerate(events) if event.get("cat") == domain]
    try:
        spans = [_span(*each) for each in own if each[1].get("ph") == "X"]
        memory = [_sample(*each) for each in own if each[1].get("ph") == "C"]
    except ValueError as problem:
        raise InputError(f"The trace {path} is damaged: {problem}. Record it again.") from None
    if not spans:
        raise NoRanges(
            f"The trace {path} has no ranges of {domain}: {_instead(events, domain)}. Record one with `bpkv generate "
            "--trace` or `bpkv profile run`."
        )
    return Recording("bpkv", spans, memory=memory, notes=_notes(document))


def _instead(events: list[dict[str, Any]], domain: str) -> str:
    """What a trace without a range has."""
    found = sorted({str(event["cat"]) for event in events if "cat" in event})
    if domain in found:
        return 'its events are none that last ("ph": "X")'
    return f"it has those of {', '.join(found)[:200]}, which --domain can name" if found else "it has none at all"


def _notes(document: dict[str, Any]) -> list[str]:
    others = document.get("otherData")
    dropped = others.get("dropped_events") if isinstance(others, dict) else None
    return [f"{dropped} earlier ranges had been dropped when the trace was written"] if dropped else []


def _span(place: int, event: dict[str, Any]) -> Span:
    start, length = _nanoseconds(place, event, "ts"), _nanoseconds(place, event, "dur")
    if length < 0:
        raise ValueError(f"event {place} ends before it begins")
    name, arguments = event.get("name"), event.get("args")
    if not isinstance(name, str):
        raise ValueError(f"event {place} has no name")
    payload = arguments.get("payload") if isinstance(arguments, dict) else None
    track = Track(*(_whole(place, event, key) for key in ("pid", "tid")))
    return Span(name, start, start + length, track, None if payload is None else _number(place, "payload", payload))


def _sample(place: int, event: dict[str, Any]) -> MemorySample:
    arguments = event.get("args")
    size = arguments.get("bytes") if isinstance(arguments, dict) else None
    return MemorySample(_nanoseconds(place, event, "ts"), round(_number(place, "bytes", size)))


def _nanoseconds(place: int, event: dict[str, Any], key: str) -> int:
    return round(_number(place, key, event.get(key)) * 1e3)


def _whole(place: int, event: dict[str, Any], key: str) -> int:
    if not isinstance(event.get(key), int):
        raise ValueError(f"event {place} has no {key}")
    return int(event[key])


def _number(place: int, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:  # nor NaN
        raise ValueError(f"event {place} has no number as {key}")
    return value
