"""`bpkv compare`: contenders measured side by side on the same samples, kept as they are finished."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bpkv_trt.documents import write_json
from bpkv_trt.errors import BpkvError, InputError
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.journal import Journal, Key, Record
from bpkv_trt.evaluation.provenance import commit
from bpkv_trt.evaluation.results import earlier_records, result_document
from bpkv_trt.evaluation.workers import measured
from bpkv_trt.progress import Progress


def run_compare(
    comparison: Comparison, output: Path | None, jobs: int, progress: Progress, *, overwrite: bool = False
) -> dict[str, Any]:
    """Measure what `output` and its journal do not hold yet; returns the document, which is written to `output`.

    Raises BpkvError before anything is run where the comparison cannot be made, or files of another one are in the way.
    """
    comparison.check()
    settings = comparison.settings()
    finished = {} if output is None else earlier_records(output, settings, overwrite)
    journal = None if output is None else Journal(output, settings)
    finished |= {} if journal is None else journal.records
    # What did not fit is tried again: memory may be free now.
    missing = [sample for sample in comparison.samples if "skipped" in finished.get(sample, {"skipped": None})]
    progress.stage("samples", len(comparison.samples))
    progress.advance(len(comparison.samples) - len(missing))
    try:
        for record in _stamped(measured(comparison, missing, jobs)):
            finished[record["task"], record["seed"]] = record
            if journal is not None:
                journal.append(record)
            progress.advance()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(journal)) from None
    except BpkvError as error:
        raise type(error)(f"{error} {_kept(journal)}") from error
    _require_some(finished)
    document = result_document(comparison, finished.values())
    if output is not None and missing:
        write_json(output, document)
    if journal is not None:
        journal.remove()
    return document


def _stamped(records: Iterator[Record]) -> Iterator[Record]:
    revision = commit()
    return ({**record, "commit": revision} for record in records)


def _require_some(finished: dict[Key, Record]) -> None:
    reasons = dict.fromkeys(record.get("skipped") for record in finished.values())
    if None not in reasons:
        raise InputError(f"No sample could be measured: {next(iter(reasons))}")


def _kept(journal: Journal | None) -> str:
    if journal is None:
        return "Nothing is kept without --json."
    count = len(journal.records)
    return f"{count} finished samples are kept in {journal.path}; the same command continues after them."
