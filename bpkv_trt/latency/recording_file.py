"""Files that recordings are read from, told apart by their content."""

from pathlib import Path

from bpkv_trt.errors import InputError
from bpkv_trt.input_file import read_start
from bpkv_trt.latency.chrome_trace import read_chrome
from bpkv_trt.latency.nsys_sqlite import read_nsys
from bpkv_trt.latency.recording import Recording

SQLITE = b"SQLite format 3\0"


def read_recording(path: Path, domain: str) -> Recording:
    """The ranges of `domain` in a trace of ours or an SQLite export of Nsight Systems. Raises InputError."""
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise InputError(
            f"The file {path} is a report of Nsight Systems, which only its own tools read: run `nsys export --type "
            f"sqlite {path}`, and give the SQLite file."
        )
    start = read_start(path, len(SQLITE), "trace", "bpkv profile report")
    if not start:
        raise InputError(f"The trace {path} is empty: whatever was to write it did not finish. Record it again.")
    return read_nsys(path, domain) if start == SQLITE else read_chrome(path, domain)
