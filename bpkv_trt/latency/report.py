"""What `bpkv profile report` says of a trace, an export or a results folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bpkv_trt.documents import SCHEMA_VERSION, library_versions
from bpkv_trt.errors import InputError
from bpkv_trt.latency.budget_table import Columns, Row
from bpkv_trt.latency.nesting import Nesting
from bpkv_trt.latency.profile import Measured
from bpkv_trt.latency.range_table import kernel_rows, range_rows
from bpkv_trt.latency.recording import NoRanges, Recording
from bpkv_trt.latency.recording_file import read_recording
from bpkv_trt.latency.results_folder import TABLES, ResultsFolder
from bpkv_trt.text_table import aligned

MS = 1e6
RANGES: Columns = {
    "range": ("range", 1, ""),
    "count": ("count", 1, ","),
    "total-ms": ("total_ns", MS, ",.3f"),
    "self-ms": ("self_ns", MS, ",.3f"),
    "nested-ms": ("nested_ns", MS, ",.3f"),
    "share": ("share", 1, ".1%"),
    "p50-ms": ("p50_ns", MS, ",.3f"),
    "p99-ms": ("p99_ns", MS, ",.3f"),
    "payload": ("payload", 1, ",.0f"),
    "kernels-ms": ("kernels_ns", MS, ",.3f"),
}
KERNELS: Columns = {
    "range": ("range", 1, ""),
    "kernel": ("kernel", 1, ""),
    **{name: RANGES[name] for name in ("count", "total-ms", "share", "p50-ms", "p99-ms")},
}


@dataclass(frozen=True)
class Report:
    """`document` is what --json writes; `timed` is what is drawn over time, ranges and memory by one clock."""

    document: dict[str, Any]
    timed: Recording

    def lines(self) -> list[str]:
        """The tables as text."""
        measured: Measured | None = self.document["measured"]
        budgets = TABLES[measured].all_columns if measured is not None else {}
        tables = ("budgets", budgets, 1), ("ranges", RANGES, 1), ("kernels", KERNELS, 2)
        lines = [f"{self.document['source']}, recorded by {self.document['made_by']}"]
        for name, columns, texts in tables:
            if self.document[name]:
                lines += ["", *_table(self.document[name], columns, texts)]
        return [*lines, *(f"note: {note}" for note in self.document["notes"])]


def _table(rows: list[Row], columns: Columns, texts: int) -> list[str]:
    cells = [[_shown(row[key], unit, form) for key, unit, form in columns.values()] for row in rows]
    return aligned([list(columns), *cells], texts)


def _shown(value: Any, unit: float, form: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value if unit == 1 else value / unit, form)


def report_on(path: Path, domain: str) -> Report:
    """Read what is at `path`; raises InputError where it is nothing that can be reported on."""
    measured: Measured | None = None
    budgets = list[Row]()
    if path.is_dir():
        folder = ResultsFolder(path)
        timed, recording = _folder(folder, domain)
        measured, runs = folder.read_runs()
        budgets = TABLES[measured].rows(runs)
    else:
        timed = recording = read_recording(path, domain)
    nesting = Nesting(recording.spans)
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "latency",
        "versions": library_versions(),
        "source": path.resolve().name,
        "made_by": recording.made_by,
        "domain": domain,
        "measured": measured,
        "budgets": budgets,
        "ranges": range_rows(nesting, recording.kernels),
        "kernels": kernel_rows(nesting, recording.kernels),
        "memory": _memory(timed),
        "notes": recording.notes,
    }
    return Report(document, timed)


def _folder(folder: ResultsFolder, domain: str) -> tuple[Recording, Recording]:
    """The session's own trace, and what the tables are made from: what Nsight Systems saw, if it did."""
    if not folder.trace.exists() or not folder.runs.exists():
        raise InputError(
            f"The folder {folder.path} holds no results of `bpkv profile run` ({folder.trace.name} and "
            f"{folder.runs.name}); give one that does, or a trace itself."
        )
    own = read_recording(folder.trace, domain)
    if not folder.nsys_database.exists():
        return own, own
    try:
        by_nsys = read_recording(folder.nsys_database, domain)
    except NoRanges as problem:
        return own, replace(own, notes=[*own.notes, f"these are times of bpkv's own trace: {problem}"])
    return own, replace(by_nsys, notes=[*by_nsys.notes, "ranges are those that nsys saw, of the warm-up too"])


def _memory(recording: Recording) -> Row | None:
    if not recording.memory:
        return None
    sizes = [sample.size for sample in recording.memory]
    return {"peak_bytes": max(sizes), "last_bytes": sizes[-1]}
