"""`bpkv compare`: its options, what is refused before a model is loaded, and where the results go."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bpkv_trt.core.budget import parse_bytes
from bpkv_trt.documents import check_destination, usable_cores
from bpkv_trt.errors import ConfigError
from bpkv_trt.options import MODEL_HELP, add_config_options, add_placement_options, config_from, file_path, importing
from bpkv_trt.progress import progress_on
from bpkv_trt.text_table import aligned

COLUMNS = {
    **{name: (name, "") for name in ("task", "regime", "budget", "contender")},
    "future-KL": ("future_kl_mean", ".3g"),
    "low": ("future_kl_low", ".3g"),
    "high": ("future_kl_high", ".3g"),
    "top-1": ("top1_agreement", ".1%"),
    "right": ("accuracy", ".1%"),
    "of-full's": ("accuracy_over_full", ".1%"),
    "entries": ("entries_fraction", ".1%"),
    "MiB": ("bytes_after", ".2f"),
    "compact-s": ("compress_s", ".3f"),
}  # header: the row's key, and its form
OWN = ("policy", "budget", "regime", "seed")  # fields of BpkvConfig that mean something else here


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    run = parser.add_argument_group("what to compare")
    run.add_argument("--model", required=True, help=MODEL_HELP)
    run.add_argument("--tasks", required=True, metavar="T,..", help="tasks, comma-separated")
    run.add_argument(
        "--policies", required=True, metavar="P,..", help="with options of their own: bpkv,bpkv[readout=direct],snapkv"
    )
    run.add_argument("--budgets", required=True, metavar="B,..", help="such as 0.5,0.2,0.1 or 64t")
    run.add_argument(
        "--regime", action="append", metavar="R", help="when to compact (default prefill); again for a second one"
    )
    run.add_argument("--samples", required=True, type=int, metavar="N", help="of every task")
    run.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the first sample (default 0; published: 1000 and up)"
    )
    run.add_argument("--tokens", type=int, default=1000, metavar="N", help="of a sample with its answer (default 1000)")
    run.add_argument("--horizon", type=int, default=40, metavar="N", help="tokens measured of a continuation (40)")
    run.add_argument("--masks", type=int, default=0, metavar="N", help="random masks per sample and kind (default 0)")
    run.add_argument("--jobs", type=int, metavar="N", help="processes (default: half as many as cores)")
    add_placement_options(run)
    run.add_argument("--json", type=file_path, metavar="OUT", help="results; a run that ended early continues")
    run.add_argument("--overwrite", action="store_true", help="replace what is at OUT, whatever it is")
    run.add_argument("--plot", type=file_path, metavar="DIR", help="draw the results there")
    add_config_options(parser.add_argument_group("what all contenders share"), without=OWN)
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> None:
    if options.overwrite and options.json is None:
        raise ConfigError("--overwrite replaces what is at the OUT of --json, which is not given; give it, or neither.")
    if options.plot is not None:
        with importing("compare --plot", "plot"):
            from bpkv_trt.evaluation.plots import NAMES, draw_all
            from bpkv_trt.picture import check_pictures
        check_pictures(options.plot, NAMES)
    jobs = _jobs(options.jobs)
    with importing("compare"):
        from bpkv_trt.compare import run_compare
        from bpkv_trt.evaluation.arm import arms_of, refuse_idle_options
        from bpkv_trt.evaluation.comparison import Comparison
        from bpkv_trt.evaluation.contender import parse_contenders
    common = config_from(options, without=OWN)
    contenders = parse_contenders(options.policies)
    budgets = _listed(options.budgets, "budgets")
    arms = arms_of(contenders, common, options.regime or ["prefill"], budgets)
    refuse_idle_options(contenders, common, arms)
    comparison = Comparison(
        model=options.model,
        tasks=tuple(_listed(options.tasks, "tasks")),
        seeds=range(options.seed, options.seed + options.samples),
        tokens=options.tokens,
        horizon=options.horizon,
        arms=arms,
        common=common,
        masks=options.masks,
        dtype=options.dtype,
        device=options.device,
        memory_limit=options.memory_limit and parse_bytes(options.memory_limit, "--memory-limit"),
    )
    if options.json is not None:
        inputs = [("--model", Path(options.model)), ("--config", options.config)]
        inputs += [("--layer-table", arm.config.layer_table) for arm in comparison.arms]
        check_destination(options.json, inputs, any_file=True)  # other results are refused where they are read
    with progress_on(Console(stderr=True)) as progress:
        document, reused = run_compare(comparison, options.json, jobs, progress, overwrite=options.overwrite)
    for line in report_lines(document):
        Console().out(line, highlight=False)
    if reused:
        Console().out(f"{reused} of {len(comparison.samples)} samples had been measured before", highlight=False)
    for picture in draw_all(document, options.plot) if options.plot is not None else ():
        Console().out(f"drawn: {picture}", highlight=False)


def report_lines(document: dict[str, Any]) -> list[str]:
    """One line per row of the comparison, in columns without spaces in them, then what was left out, and why."""
    table = [list(COLUMNS), *([_shown(row, *column) for column in COLUMNS.values()] for row in document["rows"])]
    lines = aligned(table, texts=sum(not form for _, form in COLUMNS.values()))
    if reasons := dict.fromkeys(each["skipped"] for each in document["skipped"]):
        lines.append(f"{len(document['skipped'])} samples skipped: {' '.join(reasons)}")
    if len(document["commits"]) > 1:
        lines.append(f"measured by several states of the code: {', '.join(document['commits'])}")
    return lines


def _shown(row: dict[str, Any], key: str, form: str) -> str:
    value = row[key]
    if value is None:
        return "-"
    return format(value / 2**20 if key == "bytes_after" else value, form)


def _jobs(given: int | None) -> int:
    jobs = max(1, usable_cores() // 2) if given is None else given
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}, and nothing would be measured; give 1 or more.")
    return jobs


def _listed(text: str, what: str) -> Sequence[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ConfigError(f"{what} is {text!r}, with an empty place between commas; give names separated by commas.")
    return items
