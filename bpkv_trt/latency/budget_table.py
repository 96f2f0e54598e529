"""Runs of a session put together by budget, each beside the full cache."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Columns = dict[str, tuple[str, float, str]]  # header: the row's key, the unit in which it is shown, and its form
COMPACTION = ("readout", "score", "select", "compact")
MIB = 2**20


@dataclass(frozen=True)
class BudgetTable:
    """How runs of one kind become rows; bytes and seconds."""

    needed: frozenset[str]  # keys of a run
    summary: Callable[[Sequence[Row]], Row]  # of the runs of one budget
    compared: Collection[str]  # keys of a row, whose ratios to the full cache are told
    columns: Columns  # of the table as text, beside those of all

    def rows(self, runs: Sequence[Row]) -> list[Row]:
        """One row per budget, in the order of the session.

        `over_full` has the ratios of what is `compared` to the first budget that kept every entry, where there is one.
        """
        budgets = dict.fromkeys(run["budget"] for run in runs)
        rows = [self._row([run for run in runs if run["budget"] == budget]) for budget in budgets]
        full = next((row for row in rows if row["entries_fraction"] == 1), None)
        return [row | {"over_full": None if full is None else self._ratios(row, full)} for row in rows]

    @property
    def all_columns(self) -> Columns:
        """With those that every table has."""
        shared = {"budget": ("budget", 1.0, ""), "runs": ("runs", 1.0, ""), "entries": ("entries_fraction", 1.0, ".1%")}
        return shared | self.columns

    def are_whole(self, runs: Sequence[Row]) -> bool:
        """Whether there are runs, and each has what rows are made from."""
        return bool(runs) and all(run.keys() >= self.needed and run["seconds"].keys() >= {*COMPACTION} for run in runs)

    def _row(self, runs: Sequence[Row]) -> Row:
        before, after = runs[0]["entries_before"], runs[0]["entries_after"]
        shared = {
            "budget": runs[0]["budget"],
            "runs": len(runs),
            "entries_fraction": after / before if before else 1.0,
            "bytes_peak": max(run["bytes_peak"] for run in runs),
        }
        return shared | self.summary(runs)

    def _ratios(self, row: Row, full: Row) -> Row:
        return {name: row[name] / full[name] for name in self.compared if row[name] is not None and full[name]}


def compaction_s(run: Row) -> float:
    """Seconds that a run spent in compactions."""
    return float(sum(run["seconds"][name] for name in COMPACTION))
