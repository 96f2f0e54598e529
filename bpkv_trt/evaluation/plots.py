"""Pictures of a comparison, from its document alone: PNG files, without a display."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from bpkv_trt.evaluation.ranks import mean_ranks
from bpkv_trt.evaluation.rows import ALL

Document = dict[str, Any]
Row = dict[str, Any]

# Okabe and Ito's: told apart with any colour vision, and with the markers up to 40 contenders are.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = ("o", "s", "^", "D", "v")
COLUMNS = 4  # panels side by side
POINTS = 3000  # of one scatter; more hide one another
BINS = 10
DPI = 130


def draw_all(document: Document, directory: Path) -> list[Path]:
    """Draw what the document holds into `directory`, a set of pictures per regime; returns the files written."""
    directory.mkdir(exist_ok=True)
    files = []
    for name, figure in chain.from_iterable(_figures(document, regime) for regime in document["regimes"]):
        FigureCanvasAgg(figure)
        files.append(directory / f"{name}.png")
        figure.savefig(files[-1], dpi=DPI, bbox_inches="tight")
    return files


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
    rows = [row for row in rows if row["policy"] != "full" and row["future_kl_mean"]]
    styles = _styles(row["contender"] for row in rows)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = _panels(len(tasks), width=3.6, height=3.2, sharey=True)
    for task, ax in zip(tasks, axes, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        for place, (label, style) in enumerate(styles.items()):
            shift = 1 + 0.012 * (place - (len(styles) - 1) / 2)  # so that intervals stand side by side
            own = sorted(
                (r for r in of_task if r["contender"] == label), key=lambda row: float(row["entries_fraction"])
            )
            _curve(ax, own, shift, label, style)
        samples = max(row["continued"] for row in of_task)
        ax.set_title(f"{'all tasks' if task == ALL else task} (n = {samples})", fontsize=10)
        ax.set(xscale="log", xlabel="entries kept")
        _plain_log(ax)
        shares = sorted({round(row["entries_fraction"], 2) for row in of_task})
        ax.xaxis.set_major_locator(FixedLocator(_apart(shares)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.grid(alpha=0.3, which="both", linewidth=0.5)
    for ax in axes[::COLUMNS]:
        ax.set_ylabel("future KL (nats per token)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=9)
    return figure


def _curve(ax: Axes, rows: Sequence[Row], shift: float, label: str, style: dict[str, Any]) -> None:
    mean = np.array([row["future_kl_mean"] for row in rows], dtype=float)
    low, high = (np.array([row[f"future_kl_{side}"] for row in rows], dtype=float) for side in ("low", "high"))
    x = [row["entries_fraction"] * shift for row in rows]
    errors = np.stack([mean - low, high - mean]).clip(0)
    ax.errorbar(x, mean, yerr=errors, label=label, capsize=2, linewidth=1.3, markersize=4.5, elinewidth=0.9, **style)


def _plain_log(ax: Axes) -> None:
    """A logarithmic y axis with numbers as they are written."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
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
    columns = list(dict.fromkeys((row["task"], row["budget"]) for row in rows))
    labels = list(dict.fromkeys(row["contender"] for row in rows if row["policy"] != "full"))
    values, texts = np.full((len(labels) + 1, len(columns)), np.nan), {}
    for row in rows:
        column = columns.index((row["task"], row["budget"]))
        values[0, column], texts[0, column] = row["accuracy_full"], f"{row['accuracy_full']:.0%}"
        if row["contender"] in labels:
            place = labels.index(row["contender"]) + 1, column
            values[place] = row["accuracy"]
            texts[place] = f"{row['accuracy']:.0%}\n{100 * row['accuracy_low']:.0f}–{100 * row['accuracy_high']:.0f}"
    longest = max(map(len, labels), default=0)
    figure = Figure(figsize=(1.8 + 0.085 * longest + 1.0 * len(columns), 1.3 + 0.5 * len(values)), layout="constrained")
    ax = figure.add_subplot()
    ax.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (y, x), text in texts.items():
        ax.text(x, y, text, ha="center", va="center", fontsize=8, color="black" if values[y, x] > 0.55 else "white")
    ax.set_yticks(range(len(values)), ["full cache", *labels], fontsize=9)
    ax.set_xticks(range(len(columns)), [f"{_named(task)}\n{budget}" for task, budget in columns], fontsize=8)
    ax.axhline(0.5, color="white", linewidth=3)
    ax.set_title("right answers, with 95 % intervals", fontsize=10)
    ax.tick_params(length=0)
    return figure


def retention_maps(rows: Sequence[Row]) -> Figure:
    """One panel per contender: the share of rows kept in each layer and KV head, at the smallest budget."""
    chosen = _smallest_budget([row for row in rows if row["task"] == _widest_task(rows) and row["policy"] != "full"])
    chosen = chosen or list(rows[:1])
    shape, most = np.shape(chosen[0]["retention"]), max(np.max(row["retention"]) for row in chosen)
    columns = min(len(chosen), 2 * COLUMNS if shape[1] <= 4 else COLUMNS)
    size = max(1.5, 0.3 * shape[1] + 0.6), max(2.2, 0.11 * shape[0] + 1.2)
    figure, axes = _panels(len(chosen), *size, columns=columns, sharey=True)
    for row, ax in zip(chosen, axes, strict=True):
        image = ax.imshow(row["retention"], cmap="cividis", vmin=0, vmax=most, aspect="auto", origin="lower")
        ax.set_title(_wrapped(row["contender"]), fontsize=9)
        ax.set_xticks(range(shape[1]) if shape[1] <= 8 else range(0, shape[1], 4))
        ax.set_xlabel("KV head", fontsize=9)
    for ax in axes[::columns]:
        ax.set_ylabel("layer", fontsize=9)
    figure.colorbar(image, ax=axes, label="share of rows kept", shrink=0.8)
    figure.suptitle(f"{_named(chosen[0]['task'])}, budget {chosen[0]['budget']}", fontsize=10)
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
        ax.scatter(x[::step], y[::step], s=7, alpha=0.35, color=COLOURS[0], linewidths=0, rasterized=True)
        edges = np.linspace(0, 1, BINS + 1)
        inside = [y[(x >= low) & (x <= high)] for low, high in zip(edges, edges[1:], strict=False)]
        centres = (edges[1:] + edges[:-1]) / 2
        drawn = [(centre, values.mean()) for centre, values in zip(centres, inside, strict=True) if len(values)]
        ax.plot(*np.transpose(drawn), color=COLOURS[1], marker="o", markersize=3.5, linewidth=1.3)
        found = f"$\\rho$ = {row['spearman']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        ax.set_title(f"{_wrapped(row['contender'])}\n{found}", fontsize=9)
        _plain_log(ax)
        ax.grid(alpha=0.3, linewidth=0.5)
    for ax in axes[::COLUMNS]:
        ax.set_ylabel("KL / median KL of the sample", fontsize=8)
    figure.supxlabel("rank of the mask by its score, within the sample (0: harmless)", fontsize=9)
    title = f"{summary[0]['masks']} masks of kind {kind} on each of {max(row['samples'] for row in summary)} samples"
    figure.suptitle(f"{title}, {_named(task)}, budget {budget}", fontsize=10)
    return figure


def _mask_points(document: Document, row: Row) -> tuple[np.ndarray, np.ndarray]:
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
    """A grid of panels, at most `columns` side by side; those left over are taken away."""
    columns, lines = min(columns, count), math.ceil(count / columns)
    figure = Figure(figsize=(width * columns + 0.6, height * lines + 0.5), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False, **shared).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


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


def _wrapped(label: str) -> str:
    """A contender's own options below its name."""
    return label.replace("[", "\n[", 1).replace(",", ",\n")
