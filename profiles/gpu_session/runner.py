"""Runs parts in processes of their own: a kernel that hangs, or spoils its context, takes nothing else with it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiles.gpu_session.part import Record

LOG_LINES = 40  # kept of a process that failed


@dataclass(frozen=True)
class Part:
    """Commands that share one cap; each writes its records to the file named last on its command line, if it does."""

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]


@dataclass
class Result:
    """What became of a part."""

    seconds: float = 0.0  # the longest of its commands
    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # processes that failed or were killed, with their last lines
    skipped: str | None = None

    def add(self, seconds: float, content: dict[str, Any], problem: str | None) -> None:
        self.seconds = max(self.seconds, seconds)
        self.records += content.get("records", [])
        self.skipped = content.get("skipped", self.skipped)
        self.problems += [] if problem is None else [problem]


def module(name: str, **options: object) -> list[str]:
    """The command that runs a part; a true option is a switch."""
    command = [sys.executable, "-m", f"profiles.gpu_session.{name}"]
    for option, value in options.items():
        if value is not False:
            command += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return command


def run_together(parts: Sequence[Part], work: Path, jobs: int, environment: dict[str, str]) -> dict[str, Result]:
    """Run all commands of some parts, `jobs` at a time; none outlasts its part's cap, counted from now."""
    started = time.monotonic()
    results = {part.name: Result() for part in parts}
    with ThreadPoolExecutor(jobs) as executor:
        waiting = []
        for part in parts:
            for number, command in enumerate(part.commands):
                fragment = work / f"{part.name}_{number}.json"
                deadline = started + part.seconds
                future = executor.submit(_run, [*command, "--output", str(fragment)], fragment, deadline, environment)
                waiting.append((part.name, future))
        for name, future in waiting:
            results[name].add(*future.result())
    return results


def _run(
    command: Sequence[str], fragment: Path, deadline: float, environment: dict[str, str]
) -> tuple[float, dict[str, Any], str | None]:
    """(seconds, what was written, what went wrong)."""
    log, began = fragment.with_suffix(".log"), time.monotonic()
    problem = None
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=max(0.0, deadline - began))
            if code:
                problem = f"exit status {code}"
        except subprocess.TimeoutExpired:
            problem = f"stopped after {time.monotonic() - began:.0f} s, its cap"
        finally:
            _kill(process)
    content = json.loads(fragment.read_text(encoding="utf-8")) if fragment.is_file() else {}
    if problem is not None:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        problem = "\n".join([f"{' '.join(command[1:])}: {problem}", *tail])
    return time.monotonic() - began, content, problem


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the process and whatever it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
