"""`bpkv profile`: a latency-profiling session from a file, and the report on what it recorded."""

import argparse
import shlex
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console

from bpkv_trt.documents import SCHEMA_VERSION, check_destination, deliver, library_versions, machine
from bpkv_trt.errors import BpkvError
from bpkv_trt.evaluation.provenance import commit
from bpkv_trt.latency.nsys_command import Nsys, exporting, recorded_command, recording
from bpkv_trt.latency.profile import Profile
from bpkv_trt.latency.report import Report, report_on
from bpkv_trt.latency.results_folder import ResultsFolder
from bpkv_trt.options import CommandParser, file_path, importing
from bpkv_trt.profiling import DOMAIN
from bpkv_trt.progress import progress_on
from bpkv_trt.trace_file import trace_document


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Declare the options of both parts."""
    parts = parser.add_subparsers(title="parts", metavar="PART", required=True, parser_class=CommandParser)
    run = parts.add_parser("run", help="run a profile: under Nsight Systems where it is there, else traced in process")
    run.add_argument("file", type=file_path, metavar="FILE", help="YAML, such as profiles/decode_heavy.yaml")
    run.add_argument("--output", type=file_path, metavar="DIR", help="results folder (default profile-<name of FILE>)")
    run.add_argument("--tracer", choices=("auto", "nsys", "builtin"), default="auto")
    run.add_argument("--dry-run", action="store_true", help="print the whole profile and the commands, and run nothing")
    run.set_defaults(run=_run)
    report = parts.add_parser("report", help="times by range, by kernel and by budget, of what was recorded")
    what = "a trace of bpkv, an SQLite export of Nsight Systems, or a results folder"
    report.add_argument("path", type=file_path, metavar="PATH", help=what)
    report.add_argument("--domain", default=DOMAIN, metavar="D", help=f"NVTX domain of the ranges (default {DOMAIN})")
    report.add_argument("--json", type=file_path, metavar="OUT", help="also write the report there")
    report.add_argument("--plot", type=file_path, metavar="DIR", help="draw it there")
    report.set_defaults(run=_report)


def _run(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.file)
    folder = ResultsFolder(options.output or Path(f"profile-{options.file.stem}"))
    folder.check_new()
    nsys = None if options.tracer == "builtin" else Nsys.find()
    if nsys is None and options.tracer == "nsys":
        raise BpkvError("There is no nsys on PATH; install Nsight Systems, or give --tracer builtin.")
    commands = _commands(profile, options.file, folder, nsys)
    if options.dry_run:
        Console().out(profile.to_yaml(), end="", highlight=False)
        for command in commands:
            Console().out(f"$ {shlex.join(command)}", highlight=False)
        return
    if nsys is None:
        _run_here(profile, folder)
    else:
        _run_under_nsys(commands, folder)
    made_with = {"nsys": nsys and nsys.version, "commands": commands, "commit": commit()}
    folder.write(folder.environment, _described(made_with))
    report = report_on(folder.path, DOMAIN)
    folder.write(folder.report, report.document)
    folder.write(folder.report_text, "\n".join(report.lines()) + "\n")
    _print(report)
    Console().out(f"\nresults: {folder.path}", highlight=False)


def _commands(profile: Profile, file: Path, folder: ResultsFolder, nsys: Nsys | None) -> list[list[str]]:
    command = recorded_command(file, folder.path)
    if nsys is None:
        return [command]
    report = folder.nsys_report.with_suffix("")
    return [
        recording(nsys.program, profile.nsys, command, report),
        exporting(nsys.program, folder.nsys_report, folder.nsys_database),
    ]


def _run_here(profile: Profile, folder: ResultsFolder) -> None:
    with importing("profile run"):
        from bpkv_trt.latency.session import run_session
        from bpkv_trt.policies.registry import refuse_idle, settled
    configs = [settled(profile.config(budget)) for budget in profile.budgets]  # refused before the model is loaded
    refuse_idle({*profile.options, "budget"}, configs)
    with progress_on(Console(stderr=True)) as progress:
        runs, trace = run_session(profile, progress)
    resolved = [config.model_dump(mode="json") for config in configs]
    folder.check_new()  # another session may have come before
    folder.write(folder.profile, profile.to_yaml())
    folder.write(folder.trace, trace_document(trace))
    folder.write(folder.runs, _described({"measured": profile.measured, "configs": resolved, "runs": runs}))


def _run_under_nsys(commands: list[list[str]], folder: ResultsFolder) -> None:
    folder.path.mkdir(exist_ok=True)
    for command, errors, made in zip(
        commands, (None, subprocess.STDOUT), (folder.nsys_report, folder.nsys_database), strict=True
    ):
        # What the session says of its progress, and of what it refuses, goes to the terminal.
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")
        if done.returncode != 0 or not made.exists():
            folder.write(folder.nsys_log, done.stdout)
            left = "with" if made.exists() else "without"
            raise BpkvError(
                f"`{shlex.join(command)}` ended with status {done.returncode} {left} the file {made.name}; what it "
                f"said is in {folder.nsys_log}. Mend that (a capture range may never have begun) and give --output "
                "another name, or give --tracer builtin."
            )


def _described(content: dict[str, Any]) -> dict[str, Any]:
    made_by = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), "machine": machine()}
    return made_by | content


def _report(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_destination(
            options.json, [("PATH", path) for path in (options.path, *ResultsFolder(options.path).session)]
        )
    if options.plot is not None:
        with importing("profile report --plot", "plot"):
            from bpkv_trt.latency.plots import NAMES, draw_report
            from bpkv_trt.picture import check_pictures
        check_pictures(options.plot, NAMES)
    report = report_on(options.path, options.domain)
    deliver(lambda: _print(report), options.json, report.document)
    for picture in draw_report(report, options.plot) if options.plot is not None else ():
        Console().out(f"drawn: {picture}", highlight=False)


def _print(report: Report) -> None:
    for line in report.lines():
        Console().out(line, highlight=False)
