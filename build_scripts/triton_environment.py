"""Make the environment that the real Triton Inference Server runs in, once, and print where its Python is.

PyPI has the server only inside nvidia-pytriton: 2.51.0, of 2024-10, with its Python backend, for x86-64 Linux and no
GPU. It is for tests. It is old, and input that later releases refuse can end it: never let others reach it.

Its backend needs a numpy below 2, so that it cannot share the environment of `make`; it is kept beside that one.
"""

import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from environment import CONSTRAINTS, LIGHT_PACKAGES, ROOT, SOURCES, empty_environment, made_once, python_in, run

SERVER_PACKAGE = "nvidia-pytriton"  # without its dependencies: only the files of the server are used
NEWEST_PYTHON = (3, 12)  # that a numpy below 2 has wheels for


def main() -> None:
    if missing := list(what_is_missing()):
        sys.exit("Triton's server cannot be had here: " + "; ".join(missing) + ".")
    print(python_in(made_once("triton", (*SOURCES, Path(__file__)), build)))


def what_is_missing() -> Iterable[str]:
    """What this machine lacks for the server of that package, and what to do about it."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        yield f"its package has it for Linux on x86_64, and this is {platform.system()} on {platform.machine()}"
    if sys.version_info[:2] > NEWEST_PYTHON:
        yield f"it needs a numpy below 2, so Python 3.10 to 3.12, and this is {platform.python_version()}"
    library = Path(sysconfig.get_config_var("LIBDIR")) / str(sysconfig.get_config_var("INSTSONAME"))
    if not (sysconfig.get_config_var("Py_ENABLE_SHARED") and library.exists()):
        yield "its backend needs this Python as a library (Debian: libpython3; pyenv: --enable-shared)"


def build(folder: Path) -> None:
    """Install the server, its clients and what bpkv-trt runs with, and lay out the Python backend."""
    pip = empty_environment(folder)
    constrained = ("install", "-c", str(CONSTRAINTS))
    run(*pip, *constrained, "numpy<2", "tritonclient[http,grpc]", f"{ROOT}[hf]")
    run(*pip, "uninstall", "--yes", "bpkv-trt")
    run(*pip, *constrained, "--no-deps", SERVER_PACKAGE, *LIGHT_PACKAGES)
    _lay_out_backend(folder)


def _lay_out_backend(folder: Path) -> None:
    """The backend's folder with the stub for this Python in it, and the server's command where commands are."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / f"python{version}" / "site-packages"
    server = packages / "pytriton" / "tritonserver"
    backend = folder / "backends" / "python"
    shutil.copytree(server / "backends" / "python", backend)
    stub = backend / "triton_python_backend_stub"
    shutil.copy2(server / "python_backend_stubs" / version / stub.name, stub)
    stub.chmod(0o755)
    command = folder / "bin" / "tritonserver"
    command.write_text(
        COMMAND.format(
            libraries=packages / "nvidia_pytriton.libs",
            python_library=sysconfig.get_config_var("LIBDIR"),
            commands=folder / "bin",
            server=server / "bin" / "tritonserver",
            backends=backend.parent,
        )
    )
    command.chmod(0o755)


# The loader finds the libraries by the first variable, the stub this environment by the `python` first on PATH.
COMMAND = """#!/bin/sh
export LD_LIBRARY_PATH="{libraries}:{python_library}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export PATH="{commands}:$PATH"
exec "{server}" --backend-directory="{backends}" "$@"
"""


if __name__ == "__main__":
    main()
