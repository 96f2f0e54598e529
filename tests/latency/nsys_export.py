"""What `nsys export --type sqlite` writes, made from ranges and kernels, as an older and as a newer version does."""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

PROCESS = 281488281000000 & ~0xFFFFFF


class Range(NamedTuple):
    name: str
    start: int
    end: int | None
    thread: int = 7
    payload: int | None = None
    domain: str = "bpkv"
    process: int = PROCESS
    kind: int = 59  # push and pop


class Launch(NamedTuple):
    """A call on a thread, and the kernel that it starts."""

    kernel: str
    call: int
    start: int
    end: int
    thread: int = 7
    process: int = PROCESS


OLD = """
CREATE TABLE EXPORT_META_DATA (name TEXT NOT NULL, value TEXT);
INSERT INTO EXPORT_META_DATA VALUES ('EXPORT_PRODUCT_VERSION', '2022.4.2.1'), ('EXPORT_SCHEMA_VERSION', '3.0.0');
"""
NEW = """
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2025.3.1.90'), ('EXPORT_SCHEMA_VERSION', '3.20.0');
"""


def write_export(path: Path, ranges: Sequence[Range], launches: Sequence[Launch] = (), *, new: bool = False) -> Path:
    """Tables that would be empty are left out, as nsys does; in a new export texts are numbers."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts) + 1)

    with closing(sqlite3.connect(path)) as database:
        database.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF;")  # many are written
        database.executescript("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);")
        database.executescript(NEW if new else OLD)
        if ranges:
            _write_ranges(database, ranges, number if new else None)
        if launches:
            _write_launches(database, launches, number)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", ((at, text) for text, at in texts.items()))
        database.commit()
    return path


def _write_ranges(database: sqlite3.Connection, ranges: Sequence[Range], number: Callable[[str], int] | None) -> None:
    others = "" if number else ", uint64Value INTEGER, uint32Value INTEGER, int32Value INTEGER, floatValue REAL"
    database.execute(
        "CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, "
        f"text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER, int64Value INTEGER{others})"
    )
    columns = "start, end, eventType, text, globalTid, textId, domainId, int64Value"
    insert = f"INSERT INTO NVTX_EVENTS ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    domains: dict[tuple[int, str], int] = {}
    for each in sorted(ranges, key=lambda each: each.start):
        key = each.process, each.domain
        if key not in domains:
            # Numbers of domains are those of a process, and a second one has them the other way around.
            own = [name for process, name in domains if process == each.process]
            domains[key] = len(own) + 1 if each.process == PROCESS else 2 - len(own)
            created = 0, None, 75, each.domain, each.process | each.thread, None, domains[key], None
            database.execute(insert, created)
        text = (None, number(each.name)) if number else (each.name, None)
        row = each.start, each.end, each.kind, text[0], each.process | each.thread, text[1], domains[key], each.payload
        database.execute(insert, row)


def _write_launches(database: sqlite3.Connection, launches: Iterable[Launch], number: Callable[[str], int]) -> None:
    database.executescript(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER);"
    )
    counts: dict[int, int] = {}
    for each in launches:
        counts[each.process] = correlation = counts.get(each.process, 0) + 1  # the same in every process
        name = number(each.kernel)
        kernel = each.start, each.end, 0, 7, correlation, each.process, name, name
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", kernel)
        call = each.call, each.call + 1, each.process | each.thread, correlation, number("cudaLaunchKernel_v7000")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call)
