"""Times by range, and by kernel within ranges."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpkv_trt.latency.nesting import Nesting
from bpkv_trt.latency.recording import Kernel

Row = dict[str, Any]


def range_rows(nesting: Nesting, kernels: Sequence[Kernel]) -> list[Row]:
    """One row per name, most of its own time first; all times in nanoseconds.

    `total_ns` counts a range within another in both, `nested_ns` is the part of it in ranges directly inside, `self_ns`
    the rest, and `share` is self time over the time within any range, so that shares add up to 1. `payload` is the sum.
    `kernels_ns` is that of kernels launched with this range innermost.
    """
    durations, own = defaultdict[str, list[int]](list), defaultdict[str, int](int)
    payloads, on_gpu = defaultdict[str, float](float), defaultdict[str | None, int](int)
    for span, inside in zip(nesting.spans, nesting.inside_ns, strict=True):
        durations[span.name].append(span.end_ns - span.start_ns)
        own[span.name] += span.end_ns - span.start_ns - inside
        payloads[span.name] += span.payload or 0
    for kernel in kernels:
        on_gpu[_range_of(kernel, nesting)] += kernel.end_ns - kernel.start_ns
    covered = nesting.covered_ns
    rows = [
        {
            "range": name,
            **_summary(times),
            "self_ns": own[name],
            "nested_ns": sum(times) - own[name],
            "share": own[name] / covered if covered else 0.0,
            "payload": payloads[name],
            "kernels_ns": on_gpu[name],
        }
        for name, times in durations.items()
    ]
    return sorted(rows, key=lambda row: -int(row["self_ns"]))


def kernel_rows(nesting: Nesting, kernels: Sequence[Kernel]) -> list[Row]:
    """One row per kernel and range that it was launched in (None: in no range), most time first; nanoseconds."""
    durations = defaultdict[tuple[str | None, str], list[int]](list)
    for kernel in kernels:
        durations[_range_of(kernel, nesting), kernel.name].append(kernel.end_ns - kernel.start_ns)
    total = sum(map(sum, durations.values()))
    rows = [
        {"range": name, "kernel": kernel, **_summary(times), "share": sum(times) / total if total else 0.0}
        for (name, kernel), times in durations.items()
    ]
    return sorted(rows, key=lambda row: -int(row["total_ns"]))


def _range_of(kernel: Kernel, nesting: Nesting) -> str | None:
    span = nesting.innermost(kernel.track, kernel.launched_ns)
    return None if span is None else span.name


def _summary(times: Sequence[int]) -> Row:
    p50, p99 = np.percentile(times, (50, 99))
    return {
        "count": len(times),
        "total_ns": sum(times),
        "p50_ns": float(p50),
        "p99_ns": float(p99),
        "min_ns": min(times),
        "max_ns": max(times),
    }
