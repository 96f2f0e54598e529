"""The project's own tests of its kernels, run where they are used."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from profiles.gpu_session.part import Missing, Record, Session, run_part

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "kernels"
ON_DEVICE = re.compile(r"^def test_\w+\(device\b", re.MULTILINE)  # others compile, or are about the interpreter
REHEARSED = ("test_paged.py",)


def files(rehearse: bool) -> list[Path]:
    """Those with tests that are given a device."""
    found = [path for path in sorted(FOLDER.glob("test_*.py")) if ON_DEVICE.search(path.read_text(encoding="utf-8"))]
    return [path for path in found if path.name in REHEARSED] if rehearse else found


class _Share:
    """A plugin that runs one share of the tests, since each compiles its kernels, and counts what became of them."""

    def __init__(self, share: int, shares: int) -> None:
        self.own = slice(share, None, shares)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, items) -> None:  # type: ignore[no-untyped-def]
        items[:] = items[self.own]

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed:
            self.failures.append(f"{report.nodeid}: {str(report.longrepr).splitlines()[-1]}")
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1


def measure(session: Session) -> Iterator[Record]:
    try:
        import pytest
    except ImportError:
        raise Missing("pytest is not installed") from None
    outcomes = _Share(session.share, session.shares)
    # A warning of another version of torch or Triton is no fault of a kernel.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider"]
    code = pytest.main([*map(str, files(session.rehearse)), *options], plugins=[outcomes])
    yield {"share": session.share, "exit": int(code), "failures": outcomes.failures, **outcomes.counts}


if __name__ == "__main__":
    run_part(measure)
