"""What a budget costs and saves: medians over the runs of a session."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
COMPACTION = ("readout", "score", "select", "compact")
TIMES: dict[str, Callable[[Row], float | None]] = {
    "first_token_s": lambda run: run["first_token_s"],
    "compaction_s": lambda run: sum(run["seconds"][name] for name in COMPACTION),
    "decode_step_s": lambda run: run["decode_step_s"],
    "answer_s": lambda run: run["answer_s"],
}


def budget_rows(runs: Sequence[Row]) -> list[Row]:
    """One row per budget, in the order of the session; bytes and seconds.

    `over_full` has the ratios of the same times to those of the first budget that kept every entry, where there is one.
    """
    rows = [_row(budget, [run for run in runs if run["budget"] == budget]) for budget in _budgets(runs)]
    full = next((row for row in rows if row["entries_fraction"] == 1), None)
    return [row | {"over_full": None if full is None else _ratios(row, full)} for row in rows]


def _budgets(runs: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(run["budget"] for run in runs))


def _row(budget: str, runs: Sequence[Row]) -> Row:
    times = {name: [time for run in runs if (time := time_of(run)) is not None] for name, time_of in TIMES.items()}
    return {
        "budget": budget,
        "runs": len(runs),
        "entries_fraction": runs[0]["entries_after"] / runs[0]["entries_before"] if runs[0]["entries_before"] else 1.0,
        "bytes_after": runs[0]["bytes_after"],
        "bytes_peak": max(run["bytes_peak"] for run in runs),
        **{name: statistics.median(values) if values else None for name, values in times.items()},
    }


def _ratios(row: Row, full: Row) -> Row:
    return {name: row[name] / full[name] for name in TIMES if row[name] is not None and full[name]}
