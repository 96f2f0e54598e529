"""The session: its parts in their order, each in processes of its own and under its own cap.

    bash profiles/gpu_session.sh [--output DIR] [--seed N] [--rehearse]

After every part the document is written again, so that a session that is killed leaves what was done. Exit status: 0
when all checks passed and every part ran to its end, or was not needed; 1 otherwise; 2 where nothing can be run; 130
when interrupted. A target that is missed is a finding, no failure.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bpkv_trt.documents import check_directory, library_versions, usable_cores, write_json
from bpkv_trt.errors import InputError

SCHEMA_VERSION = 1
ROOT = Path(__file__).resolve().parents[2]
CHECKING, TESTING = 10, 8  # processes that share the cases of `checks`, and the tests: each compiles its kernels
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
SLOWER = 5  # caps of a rehearsal, for a machine that others use too

NO_GPU = (
    "There is no CUDA GPU that PyTorch can use here ({reason}), and this session measures one. Run it where "
    "`python3 -c 'import torch; print(torch.cuda.is_available())'` prints True, with PYTHON=... for another "
    "interpreter, or rehearse it on this CPU: bash profiles/gpu_session.sh --rehearse --output DIR."
)


def main() -> int:
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    try:
        return session()
    except KeyboardInterrupt as interrupt:
        print(f"interrupted; {str(interrupt) or 'nothing was done'}", file=sys.stderr)
        return 130


def session() -> int:
    """What the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="profiles/gpu_session.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="directory of the results (default: profiles/results)")
    parser.add_argument("--seed", type=int, help="of the random inputs, to repeat a session (default: the clock)")
    parser.add_argument("--rehearse", action="store_true", help="everything, tiny, on the CPU; needs --output")
    options = parser.parse_args()
    if options.rehearse and options.output is None:
        parser.error("a rehearsal writes to the given --output only: name a directory.")
    reason = None if options.rehearse else why_no_gpu()
    if reason is not None:
        print(NO_GPU.format(reason=reason), file=sys.stderr)
        return 2
    output = options.output or ROOT / "profiles" / "results"
    try:
        check_directory(output)
        output.mkdir(exist_ok=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    seed = int(time.time()) if options.seed is None else options.seed
    document = begin(seed, options.rehearse)
    for name, value in (document["machine"] | document["versions"]).items():
        print(f"{name}: {value}")
    print(f"commit: {document['commit']}\nseed: {seed}")
    return run(document, output / f"{file_name(document)}.json", options.rehearse)


def why_no_gpu() -> str | None:
    """What is in the way of using a GPU, None where one can be used."""
    print("looking for a GPU ...", file=sys.stderr, flush=True)  # where imports are slow it takes half a minute
    try:
        import torch
        import triton  # noqa: F401 (that it is there)
    except ImportError as error:
        return str(error)
    return None if torch.cuda.is_available() else "torch.cuda.is_available() is False"


def begin(seed: int, rehearse: bool) -> dict[str, Any]:
    """A document without results."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rehearsal": rehearse,
        "machine": machine(rehearse),
        "versions": library_versions(),
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40") or "unknown",
        "seed": seed,
        "parts": {},
        "targets": [],
    }


def machine(rehearse: bool) -> dict[str, Any]:
    """What times belong to."""
    facts: dict[str, Any] = {"cores": usable_cores(), "gpu": None}
    if rehearse:
        return facts
    import torch

    properties = torch.cuda.get_device_properties(0)
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts | {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": torch.version.cuda,
    }


def output_of(*command: str) -> str:
    """What a command prints, nothing where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def file_name(document: dict[str, Any]) -> str:
    """After the GPU."""
    gpu = "rehearsal" if document["rehearsal"] else document["machine"]["gpu"]
    return "gpu_session_" + re.sub(r"\W+", "_", gpu).strip("_").lower()


def stages(seed: int, rehearse: bool) -> Iterator[list[Any]]:
    """Parts that run at the same time, since none of them is timed; and then one by one those that are."""
    from profiles.gpu_session.kernel_times import SHAPES
    from profiles.gpu_session.runner import Part, module

    def part(name: str, seconds: float, shares: int = 1, source: str | None = None, **more: object) -> Part:
        seconds *= SLOWER if rehearse else 1
        options = {"seed": seed, "seconds": seconds, "rehearse": rehearse, "shares": shares, "parent": os.getpid()}
        commands = [module(source or name, share=share, **options, **more) for share in range(shares)]
        return Part(name, seconds, commands)

    first = [part("checks", 120, CHECKING), part("kernel_tests", 120, 1 if rehearse else TESTING)]
    if not rehearse:  # what will be timed is compiled beside them
        first.append(part("compiled", 120, len(SHAPES), "kernel_times", small=True))
    yield first
    yield [part("races", 35)]
    yield [part("sanitizer", 55)]
    yield [part("ceilings", 30)]
    yield [part("kernel_times", 110)]
    yield [part("host_times", 110)]


def run(document: dict[str, Any], path: Path, rehearse: bool) -> int:
    """All parts; returns the exit status. KeyboardInterrupt says where that is which was done until then."""
    from profiles.gpu_session import report, targets
    from profiles.gpu_session.runner import run_together

    interrupts: list[int] = []
    for number in INTERRUPTS:  # heeded while parts run: one between a process's start and our note of it would leave it
        signal.signal(number, lambda number, frame: interrupts.append(number))
    jobs = max(2, usable_cores())
    with tempfile.TemporaryDirectory() as work:
        # What a process that is killed leaves in its temporary folder goes with ours.
        environment = os.environ | {"TRITON_INTERPRET": "1" if rehearse else "0", "TMPDIR": work}
        for stage in stages(document["seed"], rehearse):
            print(f"running {', '.join(part.name for part in stage)} ...", flush=True)
            try:
                results = run_together(stage, Path(work), jobs, environment, interrupts)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"what was done is in {path}" if document["parts"] else "") from None
            document["parts"] |= {name: asdict(result) for name, result in results.items()}
            ceilings, times = (document["parts"].get(name, {"records": []}) for name in ("ceilings", "kernel_times"))
            known = targets.ceilings_of(ceilings["records"])
            times["records"] = report.with_floors(times["records"], known)
            judged = targets.judged(ceilings["records"], times["records"])
            document["targets"] = [target.record() for target in judged]
            write_json(path, document)
    text = report.text(document)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(f"Written to {path}")
    return 0 if sound(document) else 1


def sound(document: dict[str, Any]) -> bool:
    """Whether all checks passed, and no process failed or was stopped."""
    parts = document["parts"].values()
    records = [record for part in parts for record in part["records"]]
    tests = [record for record in records if "exit" in record]
    return (
        not any(part["problems"] for part in parts)
        and all(record.get("passed", True) is not False for record in records if "exit" not in record)
        and all(record["exit"] == 0 for record in tests)
    )


if __name__ == "__main__":
    sys.exit(main())
