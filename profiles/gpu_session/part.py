"""What runs in a process of its own: a part of the session, told by its command line what to do."""

import argparse
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bpkv_trt.documents import write_json

Record = dict[str, Any]


class Missing(Exception):
    """This machine lacks what a part needs; the message says what."""


@dataclass(frozen=True)
class Session:
    """How a part is run."""

    output: Path  # of its records
    seed: int = 0
    seconds: float = 60.0  # after which the part is killed
    rehearse: bool = False  # on the CPU, in Triton's interpreter
    small: bool = False  # sizes for tools that make everything slow
    share: int = 0  # of `shares` processes that divide the part's cases
    shares: int = 1
    parent: int | None = None  # the session's process, without which it ends

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearse else "cuda")

    @property
    def tiny(self) -> bool:
        return self.rehearse or self.small

    @classmethod
    def of_command_line(cls) -> "Session":
        parser = argparse.ArgumentParser()
        parser.add_argument("--output", type=Path, required=True)
        for name, default in (("seed", 0), ("share", 0), ("shares", 1)):
            parser.add_argument(f"--{name}", type=int, default=default)
        parser.add_argument("--seconds", type=float, default=60.0)
        parser.add_argument("--parent", type=int)
        parser.add_argument("--rehearse", action="store_true")
        parser.add_argument("--small", action="store_true")
        return cls(**vars(parser.parse_args()))


def run_part(measure: Callable[[Session], Iterator[Record]]) -> None:
    """Write the records of a part, each as soon as it is there; of one that cannot run, why."""
    session = Session.of_command_line()
    if session.parent is not None:
        threading.Thread(target=_end_without, args=(session.parent,), daemon=True).start()
    if session.rehearse:
        importlib.import_module("tests.kernels.interpreter")  # mends the interpreter
    records: list[Record] = []
    try:
        for record in measure(session):
            records.append(record)
            write_json(session.output, {"records": records})
    except Missing as reason:
        write_json(session.output, {"records": records, "skipped": str(reason)})


def _end_without(parent: int) -> None:
    """End this process and whatever it has started when its parent has gone: killed, it could not do so itself."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)
