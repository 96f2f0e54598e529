"""What a budget costs and saves for a server under load.

Percentiles are over the requests of all runs, tokens per second and compaction medians over runs.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from bpkv_trt.latency.budget_table import MIB, BudgetTable, Row, compaction_s


def _summary(runs: Sequence[Row]) -> Row:
    return {
        "bytes_pool": runs[0]["bytes_pool"],
        "most_running": max(run["most_running"] for run in runs),
        "tokens_per_s": statistics.median(run["tokens_per_s"] for run in runs),
        "compaction_s": statistics.median(compaction_s(run) for run in runs),
        **_percentiles("first_token", [time for run in runs for time in run["first_token_s"]]),
        **_percentiles("token", [time for run in runs for time in run["token_s"]]),
    }


def _percentiles(name: str, times: Sequence[float]) -> Row:
    """None where there are no times: an answer of one token has none between tokens."""
    return {f"{name}_p{share}_s": float(np.percentile(times, share)) if times else None for share in (50, 99)}


LOADS = BudgetTable(
    needed=frozenset(
        {
            "budget", "entries_before", "entries_after", "bytes_pool", "bytes_peak", "most_running", "tokens_per_s",
            "first_token_s", "token_s", "seconds",
        }
    ),
    summary=_summary,
    compared=(
        "most_running", "tokens_per_s", "first_token_p50_s", "first_token_p99_s", "token_p50_s", "token_p99_s",
    ),
    columns={
        "pool-MiB": ("bytes_pool", MIB, ",.2f"),
        "peak-MiB": ("bytes_peak", MIB, ",.2f"),
        "at-once": ("most_running", 1, ""),
        "tokens-per-s": ("tokens_per_s", 1, ",.1f"),
        "first-token-p50-s": ("first_token_p50_s", 1, ".3f"),
        "first-token-p99-s": ("first_token_p99_s", 1, ".3f"),
        "token-p50-ms": ("token_p50_s", 1e-3, ",.1f"),
        "token-p99-ms": ("token_p99_s", 1e-3, ",.1f"),
        "compaction-s": ("compaction_s", 1, ".3f"),
    },
)  # fmt: skip
