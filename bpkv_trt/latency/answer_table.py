"""What a budget costs and saves for one answer: medians over the runs of a session."""

import statistics
from collections.abc import Callable, Sequence

from bpkv_trt.latency.budget_table import MIB, BudgetTable, Row, compaction_s

TIMES: dict[str, Callable[[Row], float | None]] = {
    "first_token_s": lambda run: run["first_token_s"],
    "compaction_s": compaction_s,
    "decode_step_s": lambda run: run["decode_step_s"],
    "answer_s": lambda run: run["answer_s"],
}


def _medians(runs: Sequence[Row]) -> Row:
    times = {name: [time for run in runs if (time := time_of(run)) is not None] for name, time_of in TIMES.items()}
    return {
        "bytes_after": runs[0]["bytes_after"],
        **{name: statistics.median(values) if values else None for name, values in times.items()},
    }


ANSWERS = BudgetTable(
    needed=frozenset(
        {
            "budget", "entries_before", "entries_after", "bytes_after", "bytes_peak", "first_token_s", "answer_s",
            "decode_step_s", "seconds",
        }
    ),
    summary=_medians,
    compared=TIMES,
    columns={
        "MiB": ("bytes_after", MIB, ",.2f"),
        "peak-MiB": ("bytes_peak", MIB, ",.2f"),
        "first-token-s": ("first_token_s", 1, ".3f"),
        "compaction-s": ("compaction_s", 1, ".3f"),
        "decode-step-ms": ("decode_step_s", 1e-3, ".2f"),
        "answer-s": ("answer_s", 1, ".3f"),
    },
)  # fmt: skip
