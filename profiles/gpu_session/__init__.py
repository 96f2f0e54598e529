"""One session on a GPU: every kernel checked against the core, then timed against what the machine can do."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def _find_our_tests(folder: str) -> None:
    """Let `tests` be our folder, whose helpers lay out caches, also beside a library that installs such a package.

    Ours has no __init__.py, so any other would win over it.
    """
    if "tests" in sys.modules:
        return
    found = find_spec("tests")
    if found is None or folder not in (found.submodule_search_locations or ()):
        sys.modules["tests"] = ModuleType("tests")
        sys.modules["tests"].__path__ = [folder]


_find_our_tests(str(Path(__file__).resolve().parents[2] / "tests"))
