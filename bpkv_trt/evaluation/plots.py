"""Pictures of a comparison, from its document alone: PNG files, without a display."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)
from numpy.typing import NDArray

from bpkv_trt.evaluation.ranks import mean_ranks
from bpkv_trt.evaluation.rows import ALL
from bpkv_trt.picture import COLOURS, save_pictures

Document = dict[str, Any]
Row = dict[str, Any]
Values = NDArray[np.float64]

MARKERS = ("o", "s", "^", "D", "v")  # with the colours they tell 40 contenders apart
COLUMNS = 4  # panels side by side
POINTS = 3000  # of one scatter; more hide one another
BINS = 10
NAMES = ("kl_*", "accuracy_*", "retention_*", "masks_*")  # of the pictures: by regime
SHIFT = 0.012  # of the share, between contenders side by side


def draw_all(document: Document, directory: Path) -> list[Path]:
    """Draw what the document holds into `directory`, a set of pictures per regime; returns the files written.

    Raises InputError, naming the picture, where one cannot be written; no part of it is left.
    """
    return save_pictures(chain.from_iterable(_figures(document, regime) for regime in document["regimes"]), directory)


def _figures(document: Document, regime: str) -> Iterator[tuple[str, Figure]]:
    suffix = regime.replace(",", "_")
    rows = [row for row in document["rows"] if row["regime"] == regime]
    if any(row["future_kl_mean"] for row in rows if row["policy"] != "full"):
        yield f"kl_{suffix}", kl_against_budget(rows)
    if any(row["answers"] for row in rows):
        yield f"accuracy_{suffix}", accuracy_table(rows)
    if rows:
        yield f"retention_{suffix}", retention_maps(rows)
    for kind in dict.fromkeys(row["kind"] for row in document["mask_study"] if row["regime"] == regime):
        yield f"masks_{kind}_{suffix}", score_against_kl(document, regime, kind)


def kl_against_budget(rows: Sequence[Row]) -> Figure:
    """One panel per task: mean future KL over the share of entries kept, with bootstrap intervals."""
    drawn = [row for row in rows if row["policy"] != "full" and row["future_kl_mean"]]
    styles = _styles(row["contender"] for row in drawn)
    tasks = list(dict.fromkeys(row["task"] for row in drawn))
    figure, axes = _panels(len(tasks), width=3.6 if len(tasks) > 1 else 6, height=3.2, sharey=True)
    for task, ax in zip(tasks, axes, strict=True):
        of_task = [row for row in drawn if row["task"] == task]
        ticks = _apart(sorted({row["entries_fraction"] for row in of_task}))
        for label, style in styles.items():
            own = sorted(
                (r for r in of_task if r["contender"] == label), key=lambda row: float(row["entries_fraction"])
            )
            _curve(ax, own, _shift(list(styles).index(label), len(styles), ticks), label, style)
        ax.set_title(f"{_named(task)} (n = {max(row['continued'] for row in of_task)})", fontsize=10)
        ax.set(xscale="log", xlabel="entries kept (side by side at each tick)")
        _share_axis(ax, ticks)
        ax.grid(alpha=0.3, which="both", linewidth=0.5)
    for ax in axes:
        _plain_log(ax)
    for ax in axes[:: _across(len(axes))]:
        ax.set_ylabel("future KL (nats per token)", fontsize=9)
    figure.suptitle(_title("future KL with 95 % intervals", rows) + _left_out(rows, styles), fontsize=10)
    _legend_below(figure, axes, most=2 * _across(len(axes)))
    return figure


def _left_out(rows: Sequence[Row], drawn: Iterable[str]) -> str:
    """A line on contenders that a logarithmic axis has no place for."""
    others = [row["contender"] for row in rows if row["contender"] not in drawn]
    return f"\nKL 0, not drawn: {', '.join(dict.fromkeys(others))}" if others else ""


def _shift(place: int, count: int, ticks: Sequence[float]) -> float:
    """The factor that sets one of `count` contenders beside the others, all nearer to their tick than to the next."""
    nearest = min((b / a for a, b in zip(ticks, ticks[1:], strict=False)), default=math.inf)
    step = min(math.log1p(SHIFT), 0.6 * math.log(nearest) / count)
    return math.exp(step * (place - (count - 1) / 2))


def _share_axis(ax: Axes, ticks: Sequence[float]) -> None:
    """Ticks at the shares themselves, which contenders stand around."""
    ax.xaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.2g}%"))


def _curve(ax: Axes, rows: Sequence[Row], shift: float, label: str, style: dict[str, Any]) -> None:
    mean = np.array([row["future_kl_mean"] for row in rows], dtype=float)
    low, high = (np.array([row[f"future_kl_{side}"] for row in rows], dtype=float) for side in ("low", "high"))
    x = [row["entries_fraction"] * shift for row in rows]
    errors = np.stack([mean - low, high - mean]).clip(0)
    ax.errorbar(x, mean, yerr=errors, label=label, capsize=2, linewidth=1.3, markersize=4.5, elinewidth=0.9, **style)


def _plain_log(ax: Axes) -> None:
    """A logarithmic y axis with numbers as they are written, several of them however little it spans."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5)) if high / low > 20 else MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10])
    )
    if high / low <= 20:
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _apart(shares: Sequence[float]) -> list[float]:
    """Ticks that do not write over one another on a logarithmic axis."""
    kept = list[float]()
    for share in shares:
        if share > 0 and (not kept or share / kept[-1] > 1.15):
            kept.append(share)
    return kept


def accuracy_table(rows: Sequence[Row]) -> Figure:
    """Right answers in percent with their interval, by contender and by task and budget; the full cache above."""
    rows = [row for row in rows if row["answers"]]
    columns = list(dict.fromkeys((row["task"], row["budget"], row["answers"]) for row in rows))
    labels = list(dict.fromkeys(row["contender"] for row in rows if row["policy"] != "full"))
    values, texts = np.full((len(labels) + 1, len(columns)), np.nan), {}
    for row in rows:
        column = columns.index((row["task"], row["budget"], row["answers"]))
        values[0, column], texts[0, column] = row["accuracy_full"], f"{row['accuracy_full']:.0%}"
        if row["contender"] in labels:
            place = labels.index(row["contender"]) + 1, column
            values[place], texts[place] = row["accuracy"], _with_interval(row)
    names = ["full cache", *(_wrapped(label, 34) for label in labels)]
    longest = max(len(line) for name in names for line in name.splitlines())
    height = 1.5 + sum(max(0.5, 0.2 * (1 + name.count("\n"))) for name in names)
    figure = Figure(figsize=(2.6 + 0.085 * longest + 1.1 * len(columns), height), layout="constrained")
    ax = figure.add_subplot()
    image = ax.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (y, x), text in texts.items():
        ax.text(x, y, text, ha="center", va="center", fontsize=8, color="black" if values[y, x] > 0.55 else "white")
    ax.set_yticks(range(len(values)), names, fontsize=9)
    ax.set_xticks(range(len(columns)), [_heading(*column) for column in columns], fontsize=8)
    ax.axhline(0.5, color="white", linewidth=3)
    ax.tick_params(length=0)
    figure.colorbar(image, ax=ax, format=PercentFormatter(1), label="right answers")
    known = any(row["accuracy_low"] is not None for row in rows)
    figure.suptitle(_title("right answers" + ", with 95 % intervals" * known, rows), fontsize=10)
    return figure


def _with_interval(row: Row) -> str:
    low, high = row["accuracy_low"], row["accuracy_high"]
    return f"{row['accuracy']:.0%}" + ("" if low is None else f"\n{100 * low:.0f}–{100 * high:.0f}")


def _heading(task: str, budget: str, answers: int) -> str:
    return f"{'tasks with answers' if task == ALL else task}\nbudget {budget}\n{answers} answer{'s' * (answers > 1)}"


def retention_maps(rows: Sequence[Row]) -> Figure:
    """One panel per contender that evicts: the share of rows kept by layer and KV head, at the smallest budget."""
    chosen = _smallest_budget([row for row in rows if row["task"] == _widest_task(rows) and row["policy"] != "full"])
    chosen = chosen or list(rows[:1])
    shape, most = np.shape(chosen[0]["retention"]), max(np.max(row["retention"]) for row in chosen)
    columns = 2 * COLUMNS if shape[1] <= 4 else COLUMNS
    size = max(1.5, 0.3 * shape[1] + 0.6), max(2.2, 0.11 * shape[0] + 1.2)
    figure, axes = _panels(len(chosen), *size, columns=columns, sharey=True)
    for row, ax in zip(chosen, axes, strict=True):
        image = ax.imshow(row["retention"], cmap="cividis", vmin=0, vmax=most, aspect="auto", origin="lower")
        ax.set_title(_wrapped(row["contender"], round(11 * size[0])), fontsize=8)
        ax.set_xticks(range(shape[1]) if shape[1] <= 8 else range(0, shape[1], 4))
        ax.set_xlabel("KV head", fontsize=9)
    for ax in axes[:: _across(len(axes), columns)]:
        ax.set_ylabel("layer", fontsize=9)
    figure.colorbar(image, ax=axes, label="share of rows kept", shrink=0.8)
    smallest = " (the smallest)" if len({row["budget"] for row in rows}) > 1 else ""
    title = f"rows kept, {_named(chosen[0]['task'])}"
    whole = [row["contender"] for row in rows if row["policy"] == "full" and row not in chosen]
    left_out = f"\nevicts nothing, not drawn: {', '.join(dict.fromkeys(whole))}" if whole else ""
    figure.suptitle(_title(title, chosen) + f", budget {chosen[0]['budget']}{smallest}{left_out}", fontsize=10)
    return figure


def score_against_kl(document: Document, regime: str, kind: str) -> Figure:
    """One panel per contender: each mask's rank by its score, within its sample, beside what it really costs."""
    summary = [row for row in document["mask_study"] if (row["regime"], row["kind"]) == (regime, kind)]
    task = _widest_task(summary)
    budget = summary[-1]["budget"]  # of several, the one given last
    summary = [row for row in summary if (row["task"], row["budget"]) == (task, budget)]
    figure, axes = _panels(len(summary), width=2.7, height=2.6, sharex=True, sharey=True)
    for row, ax in zip(summary, axes, strict=True):
        x, y = _mask_points(document, row)
        step = math.ceil(len(x) / POINTS)
        ax.scatter(
            x[::step], y[::step], s=7, alpha=0.35, color=COLOURS[0], linewidths=0, rasterized=True, label="a mask"
        )
        style: dict[str, Any] = {"color": COLOURS[1], "marker": "o", "markersize": 3.5, "linewidth": 1.3}
        ax.plot(*mean_by_rank(x, y), label="mean of masks of like rank", **style)
        ax.set_title(f"{_wrapped(row['contender'], 28)}\n{_correlation(row)}", fontsize=9)
        ax.grid(alpha=0.3, linewidth=0.5)
    for ax in axes:
        _plain_log(ax)
    for ax in axes[:: _across(len(axes))]:
        ax.set_ylabel("KL / median KL of the sample", fontsize=9)
    samples = max(row["samples"] for row in summary)
    title = f"{summary[0]['masks']} masks of kind {kind} on each of {samples} sample{'s' * (samples > 1)}"
    figure.suptitle(_title(f"{title}, {_named(task)}", summary) + f", budget {budget}", fontsize=10)
    _legend_below(figure, axes, most=2, title="across: rank of the mask by its score, within the sample (0: harmless)")
    return figure


def _correlation(row: Row) -> str:
    interval = "" if row["low"] is None else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"$\\rho$ = {row['spearman']:.2f}{interval}"


def mean_by_rank(x: Values, y: Values) -> tuple[Values, Values]:
    """Means of x [n] and of y [n] over masks of the same x in [0, 1], or, of many, of the same tenth of it."""
    places, group = np.unique(x, return_inverse=True)
    if len(places) > BINS:
        group = np.unique(np.minimum(x * BINS, BINS - 1).astype(int), return_inverse=True)[1]
    count = np.bincount(group)
    return np.bincount(group, x) / count, np.bincount(group, y) / count


def _mask_points(document: Document, row: Row) -> tuple[Values, Values]:
    """Rank by score in [0, 1] and KL over the sample's median, of all masks of a row's samples."""
    xs, ys = [], []
    for sample in document["samples"]:
        for study in sample["masks"] if row["task"] in (sample["task"], ALL) else ():
            same = all(study[name] == row[name] for name in ("regime", "budget", "defer", "kind"))
            if same and row["contender"] in study["scores"]:
                both = [p for p in zip(study["scores"][row["contender"]], study["truth"], strict=True) if None not in p]
                scores, truth = np.transpose(both)
                xs.append(mean_ranks(scores) / max(1, len(scores) - 1))
                ys.append(truth / np.median(truth))
    return np.concatenate(xs), np.concatenate(ys)


def _panels(
    count: int, width: float, height: float, columns: int = COLUMNS, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A grid of panels, at most `columns` side by side and lines about as long; those left over are taken away."""
    columns = _across(count, columns)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns + 0.6, height * lines + 0.5), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False, **shared).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _legend_below(figure: Figure, axes: Sequence[Axes], most: int, title: str | None = None) -> None:
    """What is drawn, in at most `most` columns below the panels, which the figure grows by."""
    handles, labels = axes[0].get_legend_handles_labels()
    texts = [_wrapped(label, 26) for label in labels]
    columns = _across(len(texts), most)
    lines = math.ceil(len(texts) / columns) + max(text.count("\n") for text in texts) + (title is not None)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.22 * lines)
    figure.legend(
        handles,
        texts,
        title=title,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        markerscale=1.2,
    )


def _across(count: int, columns: int = COLUMNS) -> int:
    """How many of `count` panels stand side by side: at most `columns`, in lines about as long."""
    return math.ceil(count / math.ceil(count / columns))


def _title(what: str, rows: Sequence[Row]) -> str:
    return f"{what}, regime {rows[0]['regime']}"


def _styles(contenders: Iterable[str]) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(contenders))
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]}
        for i, name in enumerate(names)
    }


def _smallest_budget(rows: Sequence[Row]) -> list[Row]:
    if not rows:
        return []
    smallest = min(rows, key=lambda row: float(row["entries_fraction"] or 1))["budget"]
    return [row for row in rows if row["budget"] == smallest]


def _widest_task(rows: Sequence[Row]) -> str:
    tasks = [str(row["task"]) for row in rows]
    return ALL if ALL in tasks else tasks[0]


def _named(task: str) -> str:
    return "all tasks" if task == ALL else task


def _wrapped(label: str, width: int) -> str:
    """A contender's name, and where that is longer than `width` characters, its options below it, line by line."""
    if len(label) <= width:
        return label
    lines = [""]
    for part in re.findall(r"[^\[,_/]*[\[,_/]?", label):
        opens = part.endswith("[")
        if lines[-1] and (len(lines[-1] + part) - opens > width or lines[-1].endswith(",")):
            lines.append("")
        lines[-1] += part.removesuffix("[")
        if opens:
            lines.append("[")
    return "\n".join(lines)
