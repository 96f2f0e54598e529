"""Cells of a comparison summed up: one row per contender, regime, task and budget."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bpkv_trt.evaluation.bootstrap import Bootstrap, Interval
from bpkv_trt.evaluation.ranks import spearman

ALL = "all"  # the task of rows over the samples of every task
FLOOR = 1e-9  # nats added to both KLs of a log-ratio, above rounding: two caches that both lost nothing are equal

Cell = dict[str, Any]
Row = dict[str, Any]


def rows_of(model: str, cells: Sequence[Cell], skipped: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows by task, then, with more than one task, over all of them; in the order in which the cells come."""
    tasks = dict.fromkeys(cell["task"] for cell in cells)
    rows = [row for task in tasks for row in _rows(model, task, [c for c in cells if c["task"] == task], skipped)]
    return rows + (_rows(model, ALL, cells, skipped) if len(tasks) > 1 else [])


def _rows(model: str, task: str, cells: Sequence[Cell], skipped: Sequence[dict[str, Any]]) -> list[Row]:
    rows = []
    missing = sum(task in (each["task"], ALL) for each in skipped)
    for regime in dict.fromkeys(cell["regime"] for cell in cells):
        for budget in dict.fromkeys(cell["budget"] for cell in cells):
            contenders: dict[str, list[Cell]] = {}
            for cell in cells:
                if (cell["regime"], cell["budget"]) == (regime, budget):
                    contenders.setdefault(cell["contender"], []).append(cell)
            group = _Group(contenders)
            for label, own in contenders.items():
                head = {"model": model, "policy": own[0]["policy"], "contender": label, "regime": regime}
                head |= {"scope": own[0]["scope"], "task": task, "budget": budget, "samples": len(own)}
                rows.append({**head, "skipped": missing, **group.summary(label)})
    return rows


class _Group:
    """Contenders in one regime at one budget, on the same samples."""

    def __init__(self, contenders: dict[str, list[Cell]]) -> None:
        self.contenders = contenders
        first = next(iter(contenders.values()))
        self.all = Bootstrap([cell["task"] for cell in first])
        # Whether tokens were measured is the full cache's doing, so it is the same for all contenders.
        self.continued = Bootstrap([cell["task"] for cell in first if cell["tokens"]])

    def summary(self, label: str) -> Row:
        cells = self.contenders[label]
        continued = [cell for cell in cells if cell["tokens"]]
        return {
            **self._accuracy(cells),
            **(self._divergence(continued) if continued else dict.fromkeys(_DIVERGENCE)),
            "continued": len(continued),
            "tokens": sum(cell["tokens"] for cell in cells),
            **{name: _mean(cells, name) for name in _MEANS},
            **_estimate(cells),
            "compactions": sum(cell["compactions"] for cell in cells),
            "epsilon_relaxed": sum(cell["epsilon_relaxed"] for cell in cells),
            "notes": list(dict.fromkeys(note for cell in cells for note in cell["notes"])),
            "retention": np.mean([cell["retention"] for cell in cells], axis=0).round(4).tolist(),
            "paired": [self._paired(label, other) for other in self.contenders if other != label] if continued else [],
        }

    def _accuracy(self, cells: Sequence[Cell]) -> Row:
        right, full = [sum(cell["correct"]) for cell in cells], [sum(cell["correct_full"]) for cell in cells]
        both = [sum(map(min, cell["correct"], cell["correct_full"])) for cell in cells]
        answers = [len(cell["correct"]) for cell in cells]
        accuracy, over_full = self.all.ratio(right, answers), self.all.ratio(both, full)
        return {
            "answers": sum(answers),
            **_named("accuracy", accuracy),
            "accuracy_full": sum(full) / sum(answers) if sum(answers) else None,
            **_named("accuracy_over_full", over_full),
        }

    def _divergence(self, cells: Sequence[Cell]) -> Row:
        means = [cell["future_kl_mean"] for cell in cells]
        mean = self.continued.mean(means)
        return {
            "future_kl_mean": mean.value,
            "future_kl_median": statistics.median(means),
            "future_kl_low": mean.low,
            "future_kl_high": mean.high,
            "future_kl_max": max(cell["future_kl_max"] for cell in cells),
            "future_kl_first": statistics.fmean(cell["future_kl_first"] for cell in cells),
            "top1_agreement": statistics.fmean(cell["top1"] for cell in cells),
            "common_prefix": statistics.fmean(cell["common_prefix"] for cell in cells),
        }

    def _paired(self, label: str, other: str) -> Row:
        logs = [self._logs(label), self._logs(other)]
        ratio = self.continued.mean([a - b for a, b in zip(*logs, strict=True)])
        return {"against": other, "log_ratio": ratio.value, "low": ratio.low, "high": ratio.high}

    def _logs(self, label: str) -> list[float]:
        return [math.log(cell["future_kl_mean"] + FLOOR) for cell in self.contenders[label] if cell["tokens"]]


_DIVERGENCE = (
    *(f"future_kl_{name}" for name in ("mean", "median", "low", "high", "max", "first")),
    "top1_agreement",
    "common_prefix",
)
_MEANS = ("entries_fraction", "bytes_before", "bytes_after", "pages_freed", "compress_s", "decode_s")


def _named(name: str, found: Interval | None) -> Row:
    keys = (name, f"{name}_low", f"{name}_high")
    return dict(zip(keys, (None,) * 3 if found is None else (found.value, found.low, found.high), strict=True))


def _present(cells: Sequence[Cell], read: Callable[[Cell], Any]) -> list[Any]:
    return [value for value in map(read, cells) if value is not None]


def _mean(cells: Sequence[Cell], name: str) -> float | None:
    values = _present(cells, lambda cell: cell[name])
    return statistics.fmean(values) if values else None


def _estimate(cells: Sequence[Cell]) -> Row:
    """The estimate of a selected mask beside its true KL at the same positions: median ratio and rank correlation."""
    both = [(c["estimated_kl"], c["one_step_kl"]) for c in cells if None not in (c["estimated_kl"], c["one_step_kl"])]
    ratios = [estimate / truth for estimate, truth in both if truth > 0]
    return {
        "estimate_ratio": statistics.median(ratios) if ratios else None,
        "estimate_spearman": spearman(*zip(*both, strict=True)) if len(both) > 1 else None,
    }
