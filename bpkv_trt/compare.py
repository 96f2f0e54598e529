"""`bpkv compare`: contenders measured side by side on the same samples, kept as they are finished."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from bpkv_trt.documents import write_json
from bpkv_trt.errors import BpkvError, InputError
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.journal import Journal, Key, Record
from bpkv_trt.evaluation.provenance import commit
from bpkv_trt.evaluation.results import earlier_records, result_document
from bpkv_trt.evaluation.workers import measured
from bpkv_trt.progress import Progress


class Outcome(NamedTuple):
    """What came of a comparison."""

    document: dict[str, Any]
    reused: int  # samples that an earlier run had finished


def run_compare(
    comparison: Comparison, output: Path | None, jobs: int, progress: Progress, *, overwrite: bool = False
) -> Outcome:
    """Measure what `output` and its journal do not hold yet; the document is written to `output`.

    overwrite: what is at `output` is not read, and a journal of another comparison gives way.

    Raises BpkvError before anything is run where the comparison cannot be made, where files of another one are in the
    way, or while another run writes to `output`.
    """
    comparison.check()
    if output is None:
        return _run(comparison, None, jobs, progress, overwrite)
    with _alone_with(output):
        return _run(comparison, output, jobs, progress, overwrite)


@contextmanager
def _alone_with(output: Path) -> Iterator[None]:
    lock = output.with_name(output.name + ".lock")
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        raise InputError(
            f"Another run is adding to {output}. Nothing was run: wait until it ends, or give --json another name."
        ) from None


def _run(comparison: Comparison, output: Path | None, jobs: int, progress: Progress, overwrite: bool) -> Outcome:
    settings = comparison.settings()
    finished = {} if output is None else earlier_records(output, settings, overwrite)
    journal = None if output is None else Journal(output, settings, overwrite)
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
    _require_some(finished, journal)
    document = result_document(comparison, finished.values())
    if output is not None and journal is not None and journal.records:
        write_json(output, document)
        journal.remove()
    return Outcome(document, reused=len(comparison.samples) - len(missing))


def _stamped(records: Iterator[Record]) -> Iterator[Record]:
    revision = commit()
    return ({**record, "commit": revision} for record in records)


def _require_some(finished: dict[Key, Record], journal: Journal | None) -> None:
    reasons = dict.fromkeys(record.get("skipped") for record in finished.values())
    if None not in reasons:
        if journal is not None:
            journal.remove()
        raise InputError(f"No sample could be measured: {next(iter(reasons))}")


def _kept(journal: Journal | None) -> str:
    if journal is None:
        return "Nothing is kept without --json."
    count = len(journal.records)
    return f"{count} finished samples are kept in {journal.path}; the same command continues after them."
