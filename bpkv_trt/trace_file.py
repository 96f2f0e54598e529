"""A trace kept in a file, as Chrome's trace format has it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bpkv_trt.documents import SCHEMA_VERSION, library_versions, machine, write_json
from bpkv_trt.errors import BpkvError
from bpkv_trt.profiling import Trace


@contextmanager
def traced(path: Path | None, synchronize: Callable[[], None] | None = None) -> Iterator[Trace]:
    """A trace of the block. With a `path` every range is recorded, and written there at the end, be it an interrupt.

    What is refused by a BpkvError leaves no file.
    """
    trace = Trace(synchronize, record=path is not None)
    try:
        yield trace
    except BpkvError:
        path = None
        raise
    finally:
        if path is not None:
            trace.weigh()  # what was held to the last range may have been given back since
            write_json(path, trace_document(trace))


def trace_document(trace: Trace) -> dict[str, Any]:
    """The trace with what it was made by; viewers pass over keys that they do not know."""
    made_by = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), "machine": machine()}
    return made_by | trace.chrome()
