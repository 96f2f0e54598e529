"""Pictures of a latency report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bpkv_trt.latency.recording import Recording
from bpkv_trt.latency.report import MIB, MS, Report
from bpkv_trt.picture import COLOURS, save_picture

TIMES = {"first_token_s": "first token", "compaction_s": "compaction", "decode_step_s": "decode step"}
MOST_BARS = 20_000  # of a timeline; more hide one another


def draw_report(report: Report, directory: Path) -> list[Path]:
    """Draw what the report holds into `directory`; returns the files written. InputError where one cannot be."""
    directory.mkdir(exist_ok=True)
    files = []
    for name, figure in _figures(report):
        files.append(directory / f"{name}.png")
        save_picture(figure, files[-1])
    return files


def _figures(report: Report) -> Iterator[tuple[str, Figure]]:
    if len(report.document["budgets"]) > 1:
        yield "latency_against_budget", latency_against_budget(report.document["budgets"])
    yield "timeline", timeline(report.timed)


def latency_against_budget(rows: Sequence[dict[str, Any]]) -> Figure:
    """One panel per time: its median over the share of entries kept, beside the bytes that stay."""
    figure = Figure(figsize=(3.4 * (len(TIMES) + 1), 3), layout="constrained")
    panels = figure.subplots(1, len(TIMES) + 1)
    rows = sorted(rows, key=lambda row: float(row["entries_fraction"]))
    for ax, (key, title), colour in zip(panels, TIMES.items(), COLOURS, strict=False):
        unit, factor = ("ms", 1e3) if key == "decode_step_s" else ("s", 1.0)
        drawn = [row for row in rows if row[key] is not None]
        ax.plot([row["entries_fraction"] for row in drawn], [row[key] * factor for row in drawn], "o-", color=colour)
        ax.set(title=title, ylabel=unit)
    for key, label, style in (("bytes_peak", "peak", "s--"), ("bytes_after", "after compaction", "o-")):
        sizes = [row[key] / MIB for row in rows]
        panels[-1].plot([row["entries_fraction"] for row in rows], sizes, style, color=COLOURS[3], label=label)
    panels[-1].set(title="cache", ylabel="MiB")
    panels[-1].legend(frameon=False, fontsize=8)
    for ax in panels:
        ax.set(xlabel="entries kept", ylim=(0, 1.08 * max(ax.dataLim.ymax, 1e-9)))
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
