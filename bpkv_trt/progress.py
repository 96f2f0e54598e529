"""How long work reports that it advances: on a terminal with bars, elsewhere not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """What a long computation calls."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage begins, of `total` steps where that is known; the one before is over."""

    def advance(self, steps: int = 1) -> None:
        """So many steps of the stage are done."""


class SilentProgress:
    """Reports nothing."""

    def stage(self, name: str, total: int | None = None) -> None: ...

    def advance(self, steps: int = 1) -> None: ...


class TerminalProgress:
    """One bar per stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def stage(self, name: str, total: int | None = None) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(name, total=total)

    def advance(self, steps: int = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, steps)


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """Bars that vanish when the work is over, if `console` is a terminal."""
    if not console.is_terminal:
        yield SilentProgress()
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bars(*columns, console=console, transient=True) as bars:
        yield TerminalProgress(bars)
