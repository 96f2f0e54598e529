"""Which state of the code produced a result."""

import subprocess
from pathlib import Path

import bpkv_trt


def commit() -> str | None:
    """The commit of the checkout that the package runs from, `-dirty` where its files differ; None outside of one."""
    package = Path(bpkv_trt.__file__).parent
    revision = _git(package, "rev-parse", "HEAD")
    tracked = _git(package, "ls-files", "__init__.py")  # a checkout around an installed copy is not ours
    if not revision or not tracked:
        return None
    return revision + ("-dirty" if _git(package, "status", "--porcelain", "--", ".") else "")


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
