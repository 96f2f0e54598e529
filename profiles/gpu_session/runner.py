"""Runs parts in processes of their own: a kernel that hangs, or spoils its context, takes nothing else with it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiles.gpu_session.part import Record

LOG_LINES = 40  # kept of a process that failed
TICK = 0.02  # seconds between looks at what runs


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


def run_together(
    parts: Sequence[Part], work: Path, jobs: int, environment: dict[str, str], interrupts: Sequence[int] = ()
) -> dict[str, Result]:
    """Run all commands of some parts, `jobs` at a time; none outlasts its part's cap, counted from now.

    KeyboardInterrupt once there are `interrupts`. Whatever is raised, nothing is left running.
    """
    began = time.monotonic()
    waiting = deque(
        (part.name, command, work / f"{part.name}_{number}.json", began + part.seconds)
        for part in parts
        for number, command in enumerate(part.commands)
    )
    started: list[_Process] = []
    running: list[_Process] = []
    try:
        while waiting or running:
            if interrupts:
                raise KeyboardInterrupt
            while waiting and len(running) < jobs:
                running.append(_Process(*waiting.popleft(), environment))
                started.append(running[-1])
            time.sleep(TICK)
            running = [process for process in running if not process.ended()]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.process.wait()
    results = {part.name: Result() for part in parts}
    for process in started:
        results[process.part].add(*process.outcome())
    return results


class _Process:
    """A command that has been started, in a session of its own."""

    def __init__(
        self, part: str, command: Sequence[str], fragment: Path, deadline: float, environment: dict[str, str]
    ) -> None:
        self.part, self.fragment, self.deadline = part, fragment, deadline
        self.command = [*command, "--output", str(fragment)]
        self.log, self.began = fragment.with_suffix(".log"), time.monotonic()
        self.seconds, self.problem = 0.0, ""
        with self.log.open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self) -> bool:
        """Whether it has; past its deadline it is made to."""
        code, now = self.process.poll(), time.monotonic()
        if code is None and now < self.deadline:
            return False
        self.seconds = now - self.began
        if code != 0:
            self.problem = f"stopped after {self.seconds:.0f} s, its cap" if code is None else f"exit status {code}"
        self.kill()
        self.process.wait()
        return True

    def kill(self) -> None:
        """End it and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def outcome(self) -> tuple[float, dict[str, Any], str | None]:
        """(seconds, what was written, what went wrong), once it has ended."""
        content = json.loads(self.fragment.read_text(encoding="utf-8")) if self.fragment.is_file() else {}
        if not self.problem:
            return self.seconds, content, None
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return self.seconds, content, "\n".join([f"{' '.join(self.command[1:])}: {self.problem}", *tail])
