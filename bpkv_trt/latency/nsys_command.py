"""The commands of Nsight Systems, as 2022.4 and newer take them."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bpkv_trt.errors import BpkvError
from bpkv_trt.latency.profile import NsysOptions
from bpkv_trt.profiling import DOMAIN

OLDEST = (2022, 4)


@dataclass(frozen=True)
class Nsys:
    """An installation that was found."""

    program: str
    version: str

    @classmethod
    def find(cls) -> "Nsys | None":
        """The one on PATH, if any; raises BpkvError where it does not work or is too old."""
        program = shutil.which("nsys")
        if program is None:
            return None
        done = subprocess.run([program, "--version"], capture_output=True, text=True)
        version = re.search(r"(\d{4})\.(\d+)[\w.-]*", done.stdout)
        advice = "Take another one from PATH, or give --tracer builtin."
        if done.returncode != 0 or version is None:
            raise BpkvError(
                f"{program} --version says nothing of use ({(done.stderr or done.stdout)[:200]!r}). {advice}"
            )
        if (int(version[1]), int(version[2])) < OLDEST:
            raise BpkvError(f"{program} is version {version[0]}, and 2022.4 or newer is needed. {advice}")
        return cls(program, version[0])


def recording(program: str, options: NsysOptions, command: Sequence[str], report: Path) -> list[str]:
    """The command that records `command` into `report`, a name without its ending."""
    arguments = [
        f"--trace={','.join(options.trace)}",
        "--sample=none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
        f"--output={report}",
    ]
    if "cuda" in options.trace:
        arguments.append(f"--cuda-graph-trace={options.cuda_graph_trace}")
    if options.trace_fork_before_exec:
        arguments.append("--trace-fork-before-exec=true")
    if options.capture_range != "none":
        arguments += [f"--capture-range={options.capture_range}", "--capture-range-end=stop"]
    if options.capture is not None:
        arguments.append(f"--nvtx-capture={options.capture}@{DOMAIN}")
    if options.environment:
        arguments.append("--env-var=" + ",".join(f"{name}={value}" for name, value in options.environment.items()))
    return [program, "profile", *arguments, *command]


def exporting(program: str, report: Path, database: Path) -> list[str]:
    """The command that writes a report as SQLite."""
    return [program, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]


def recorded_command(profile: Path, output: Path) -> list[str]:
    """What is recorded: this command again, without Nsight Systems around it."""
    arguments = ["profile", "run", str(profile), "--tracer", "builtin", "--output", str(output)]
    return [sys.executable, "-m", "bpkv_trt", *arguments]
