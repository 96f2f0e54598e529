"""Reading what `nsys export --type sqlite` writes, by versions 2022.4 and newer.

Tables and columns appear only where something was recorded; a text is in `text` or, by number, in `textId`.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from bpkv_trt.errors import InputError
from bpkv_trt.latency.recording import Kernel, NoRanges, Recording, Span, Track

PUSH_POP, DOMAIN_CREATED = 59, 75  # values of eventType
PROCESS = ~0xFFFFFF  # of a globalTid; the lower bits are the thread's number
VERSIONS = ("EXPORT_META_DATA", "META_DATA_EXPORT")  # before 2023, and since
EXPORT = "export the report again with `nsys export --type sqlite`"


def read_nsys(path: Path, domain: str) -> Recording:
    """The push/pop ranges of an NVTX domain, and all kernels. Raises InputError for what is no such export."""
    try:
        _require_whole(path)
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _read(path, database, domain)
    except (sqlite3.DatabaseError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"The SQLite file {path} is cut off or damaged ({error}); {EXPORT}.") from None


def _require_whole(path: Path) -> None:
    """Raise ValueError where a file has fewer pages than its header says: of what is missing SQLite may not notice."""
    with path.open("rb") as file:
        header = file.read(100)
    page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    whole = (65536 if page == 1 else page) * pages
    if len(header) < 100 or path.stat().st_size < whole:
        raise ValueError(f"it has {path.stat().st_size} of {whole} bytes")


def _read(path: Path, database: sqlite3.Connection, domain: str) -> Recording:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    if "StringIds" not in tables or not tables & {"NVTX_EVENTS", "PROCESSES", *VERSIONS}:
        found = ", ".join(sorted(tables))[:200] or "none"
        raise InputError(
            f"The SQLite file {path} is no export of Nsight Systems (its tables: {found}); give one, made with "
            "`nsys export --type sqlite`."
        )
    made_by = _version(database, tables)
    spans, unfinished = _spans(database, domain) if "NVTX_EVENTS" in tables else ([], 0)
    if not spans:
        raise NoRanges(
            f"The export {path} ({made_by}) has no finished NVTX ranges of the domain {domain}. Record with `--trace "
            "nvtx`; Nsight Systems 2022.4 sees Python's ranges only with `pip install nvtx==0.2.11`."
        )
    notes = [f"{unfinished} ranges had not ended when recording did, and are not counted"] if unfinished else []
    return Recording(made_by, spans, list(_kernels(database, tables)), notes=notes)


def _version(database: sqlite3.Connection, tables: set[str]) -> str:
    for table in tables.intersection(VERSIONS):
        for (value,) in database.execute(f"SELECT value FROM {table} WHERE name = 'EXPORT_PRODUCT_VERSION'"):
            return f"nsys {value}"
    return "nsys"


def _spans(database: sqlite3.Connection, domain: str) -> tuple[list[Span], int]:
    columns = _columns(database, "NVTX_EVENTS")
    text = _text("NVTX_EVENTS", columns)
    payloads = [name for name in ("int64Value", "uint64Value", "int32Value", "uint32Value") if name in columns]
    payload = f"COALESCE({', '.join(payloads)}, NULL)" if payloads else "NULL"
    created = database.execute(
        f"SELECT globalTid, domainId FROM NVTX_EVENTS WHERE eventType = {DOMAIN_CREATED} AND {text} = ?", (domain,)
    )
    domains = {(_process(thread), number) for thread, number in created}  # every process counts its own
    spans, unfinished = [], 0
    for start, end, name, thread, number, amount in database.execute(
        f"SELECT start, end, {text}, globalTid, domainId, {payload} FROM NVTX_EVENTS WHERE eventType = {PUSH_POP} "
        "ORDER BY rowid"
    ):
        if (_process(thread), number) not in domains:
            continue
        if end is None:
            unfinished += 1
        else:
            spans.append(Span(str(name), int(start), int(end), _track(thread), amount))
    return spans, unfinished


def _kernels(database: sqlite3.Connection, tables: set[str]) -> Iterator[Kernel]:
    kernels, calls = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
    if not {kernels, calls} <= tables:
        return
    columns = _columns(database, kernels)
    name = next(name for name in ("demangledName", "shortName", "mangledName") if name in columns)
    # Correlation numbers are those of a process, where the export says of which.
    same_process = f"AND call.globalTid & {PROCESS} = kernel.globalPid & {PROCESS}" if "globalPid" in columns else ""
    for text, start, end, launched, thread in database.execute(
        f"SELECT StringIds.value, kernel.start, kernel.end, call.start, call.globalTid FROM {kernels} AS kernel "
        f"JOIN {calls} AS call ON call.correlationId = kernel.correlationId {same_process} "
        f"LEFT JOIN StringIds ON StringIds.id = kernel.{name}"
    ):
        yield Kernel(str(text), int(start), int(end), int(launched), _track(thread))


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}


def _text(table: str, columns: set[str]) -> str:
    """SQL for the text of an event."""
    by_number = f"(SELECT value FROM StringIds WHERE id = {table}.textId)"
    forms = [form for column, form in (("text", f"{table}.text"), ("textId", by_number)) if column in columns]
    return f"COALESCE({', '.join([*forms, 'NULL'])})"


def _process(thread: Any) -> int | None:
    return None if thread is None else int(thread) & PROCESS


def _track(thread: int) -> Track:
    return Track(int(thread) & PROCESS, int(thread) & ~PROCESS)
