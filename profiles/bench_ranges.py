"""What a range of `bpkv_trt.profiling` costs, in nanoseconds, with the profiler that this process has, if any.

    python profiles/bench_ranges.py [--ranges 20000] [--repeats 15] [--json FILE]

The smallest of the repeats, since whatever else the machine does only adds to it.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from bpkv_trt import profiling
from bpkv_trt.documents import SCHEMA_VERSION, library_versions, machine
from bpkv_trt.profiling import Trace


def cost(run: Callable[[int], None], ranges: int, repeats: int) -> float:
    """Nanoseconds of one of so many."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        run(ranges)
        times.append((time.perf_counter_ns() - start) / ranges)
    return min(times)


def empty(ranges: int) -> None:
    for _ in range(ranges):
        pass


def ranges_of(record: bool) -> Callable[[int], None]:
    def run(ranges: int) -> None:
        trace = Trace(record=record)
        for _ in range(ranges):
            with trace.range("decode", payload=1):
                pass

    return run


def costs(ranges: int, repeats: int) -> dict[str, float]:
    """The loop itself is taken off."""
    loop = cost(empty, ranges, repeats)
    found = {"range": cost(ranges_of(False), ranges, repeats), "recorded": cost(ranges_of(True), ranges, repeats)}
    package, profiling.nvtx = profiling.nvtx, None
    found["without_nvtx"] = cost(ranges_of(False), ranges, repeats)
    profiling.nvtx = package
    return {name: round(value - loop, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranges", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    body = {
        "schema_version": SCHEMA_VERSION,
        "versions": library_versions() | {"nvtx": version("nvtx") if profiling.nvtx else None},
        "machine": machine(),
        "nanoseconds": costs(options.ranges, options.repeats),
    }
    text = json.dumps(body, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
