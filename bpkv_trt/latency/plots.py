"""Pictures of a latency report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bpkv_trt.latency.budget_table import MIB
from bpkv_trt.latency.profile import Measured
from bpkv_trt.latency.recording import Recording
from bpkv_trt.latency.report import MS, Report
from bpkv_trt.picture import COLOURS, save_pictures

Curves = dict[str, str]  # keys of a row, and their labels where a panel has several
Panels = dict[str, tuple[str, float, Curves]]  # by title: unit, its factor, curves
ANSWERS: Panels = {
    "first token": ("s", 1, {"first_token_s": ""}),
    "compaction": ("s", 1, {"compaction_s": ""}),
    "decode step": ("ms", 1e3, {"decode_step_s": ""}),
    "cache": ("MiB", 1 / MIB, {"bytes_peak": "peak", "bytes_after": "after compaction"}),
}
LOADS: Panels = {
    "requests at once": ("", 1, {"most_running": ""}),
    "throughput": ("tokens per second", 1, {"tokens_per_s": ""}),
    "first token": ("s", 1, {"first_token_p50_s": "median", "first_token_p99_s": "99 %"}),
    "time per token": ("ms", 1e3, {"token_p50_s": "median", "token_p99_s": "99 %"}),
    "cache": ("MiB", 1 / MIB, {"bytes_pool": "pool", "bytes_peak": "peak"}),
}
PANELS: dict[Measured, tuple[str, Panels]] = {
    "answers": ("latency_against_budget", ANSWERS),
    "loads": ("load_against_budget", LOADS),
}
TIMELINE = "timeline"
NAMES = (*(name for name, _ in PANELS.values()), TIMELINE)  # of all pictures that there can be
MOST_BARS = 20_000  # of a timeline; more hide one another


def draw_report(report: Report, directory: Path) -> list[Path]:
    """Draw what the report holds into `directory`; returns the files written. InputError where one cannot be."""
    return save_pictures(_figures(report), directory)


def _figures(report: Report) -> Iterator[tuple[str, Figure]]:
    measured: Measured | None = report.document["measured"]
    if measured is not None and len(report.document["budgets"]) > 1:
        name, panels = PANELS[measured]
        yield name, against_budget(report.document["budgets"], panels)
    yield TIMELINE, timeline(report.timed)


def against_budget(rows: Sequence[dict[str, Any]], panels: Panels) -> Figure:
    """What a budget costs and saves, over the share of entries kept."""
    figure = Figure(figsize=(3.4 * len(panels), 3), layout="constrained")
    rows = sorted(rows, key=lambda row: float(row["entries_fraction"]))
    for ax, (title, (unit, factor, curves)), colour in zip(
        figure.subplots(1, len(panels)), panels.items(), COLOURS, strict=False
    ):
        for (key, label), style in zip(curves.items(), ("o-", "s--"), strict=False):
            drawn = [row for row in rows if row[key] is not None]
            shares, values = [row["entries_fraction"] for row in drawn], [row[key] * factor for row in drawn]
            ax.plot(shares, values, style, color=colour, label=label)
        if len(curves) > 1:
            ax.legend(frameon=False, fontsize=8)
        ax.set(title=title, ylabel=unit, xlabel="entries kept", ylim=(0, 1.08 * max(ax.dataLim.ymax, 1e-9)))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.grid(alpha=0.3, linewidth=0.5)
    return figure


def timeline(recording: Recording) -> Figure:
    """Memory of the cache over time, where it was recorded, above the ranges, a line for each name."""
    names = list(dict.fromkeys(span.name for span in recording.spans))
    origin = min(span.start_ns for span in recording.spans)
    with_memory = bool(recording.memory)
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(names) + 2 * with_memory), layout="constrained")
    if with_memory:
        above, ax = figure.subplots(2, 1, sharex=True, height_ratios=(2, 0.3 * len(names) + 0.4))
        times = [(sample.time_ns - origin) / MS / 1e3 for sample in recording.memory]
        above.step(times, [sample.size / MIB for sample in recording.memory], where="post", color=COLOURS[0])
        above.set(ylabel="cache (MiB)", ylim=(0, None))
        above.grid(alpha=0.3, linewidth=0.5)
    else:
        ax = figure.subplots()
    for line, name in enumerate(names):
        bars = [
            ((span.start_ns - origin) / MS / 1e3, (span.end_ns - span.start_ns) / MS / 1e3)
            for span in recording.spans
            if span.name == name
        ]
        step = -(-len(bars) // MOST_BARS)
        ax.broken_barh(bars[::step], (line - 0.4, 0.8), color=COLOURS[line % len(COLOURS)])
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel="seconds", ylim=(len(names) - 0.5, -0.5))
    return figure
