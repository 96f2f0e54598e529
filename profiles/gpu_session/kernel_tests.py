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


class _Outcomes:
    """A plugin that counts tests by what became of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

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
    for path in files(session.rehearse)[session.share :: session.shares]:
        outcomes = _Outcomes()
        # A warning of another version of torch or Triton is no fault of a kernel.
        code = pytest.main([str(path), "-q", "-W", "default", "-p", "no:cacheprovider"], plugins=[outcomes])
        yield {"file": path.name, "exit": int(code), "failures": outcomes.failures, **outcomes.counts}


if __name__ == "__main__":
    run_part(measure)
