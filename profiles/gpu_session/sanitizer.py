"""All kernels on small inputs under NVIDIA's memory checker, where there is one: bad addresses, and races within one
program. It sees every access, and so takes far longer than the kernels do."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from profiles.gpu_session.part import Missing, Record, Session, run_part
from profiles.gpu_session.runner import TICK, module

TOOLS = ("memcheck", "racecheck")
FOUND = 99  # exit status by which the checker tells of findings
NOTHING, FINDINGS = "nothing found", "findings"
RESERVE = 5.0  # seconds of the part's cap for the checker to be stopped in
LINES = 30  # kept of what it says


def checker() -> str | None:
    """The program, on PATH or beside the CUDA compiler."""
    compiler = shutil.which("nvcc")
    beside = None if compiler is None else str(Path(compiler).resolve().parent)
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside or os.devnull)


def measure(session: Session) -> Iterator[Record]:
    program = checker()
    if session.rehearse:
        raise Missing("a rehearsal runs nothing on a GPU")
    if program is None:
        raise Missing("no compute-sanitizer on PATH or beside nvcc")
    began = time.monotonic()
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for tool in TOOLS:
            started[tool] = _start(program, tool, session)
        waiting = list(TOOLS)
        while waiting:
            time.sleep(TICK)
            seconds = time.monotonic() - began
            for tool in list(waiting):
                code = started[tool].poll()
                if code is not None or seconds > session.seconds - RESERVE:
                    waiting.remove(tool)
                    yield _record(tool, code, seconds, _log(tool, session))
    finally:
        for process in started.values():
            process.kill()  # what it started ends with this part
        for process in started.values():
            process.wait()


def _log(tool: str, session: Session) -> Path:
    return session.output.with_suffix(f".{tool}.log")


def _start(program: str, tool: str, session: Session) -> "subprocess.Popen[bytes]":
    # Without torch's own allocator every tensor is an allocation, beyond whose end nothing may be read.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    output = session.output.with_suffix(f".{tool}.json")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += module("checks", small=True, seed=session.seed, shares=1000, output=output)  # the first case alone
    with _log(tool, session).open("w") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)


def _record(tool: str, code: int | None, seconds: float, log: Path) -> Record:
    """What a tool has found; without an exit status it is stopped."""
    status = {None: "stopped at its cap", 0: NOTHING, FOUND: FINDINGS}.get(code, f"exit status {code}")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("=========")]
    return {"tool": tool, "status": status, "seconds": seconds, "said": lines[:LINES],
            "passed": {NOTHING: True, FINDINGS: False}.get(status)}  # fmt: skip


if __name__ == "__main__":
    run_part(measure)
