"""`bpkv doctor`: what of this machine can be used, and what to do about the rest.

Packages are imported in processes of their own: one that is broken, even to the point of crashing the interpreter, is
a finding like any other.
"""

import ctypes.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bpkv_trt.errors import BpkvError, InputError
from bpkv_trt.models.catalogue import CATALOGUE
from bpkv_trt.user_directory import user_cache_directory

Status = Literal["ok", "missing", "broken"]
_TIMEOUT_S = 120
# What stands in for TensorRT in the tests, where there is none: name, package and use.
REHEARSAL = (
    ("TensorRT plugin registry", "tensorrt_dispatch_cu13_libs", "needed only to test the plugin"),
    ("TensorRT-RTX", "tensorrt_rtx_cu13_bindings", "needed only to test networks"),
)
_STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for; `advice` is empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def examine(engine: Path | None = None, plugin_lib: Path | None = None) -> list[Finding]:
    """Look at everything, and at an engine's folder if one is named; as long as the slowest package takes to import.

    plugin_lib: by default as `PluginLibrary.find` looks for it.
    """
    checks: list[Callable[[], Finding]] = [
        _python,
        _memory,
        _cache_directory,
        lambda: _module(
            "PyTorch",
            "torch",
            "import torch; print(torch.__version__, 'with', torch.get_num_threads(), 'threads')",
            "pip install 'bpkv-trt[torch]'",
        ),
        _gpu,
        lambda: _module(
            "transformers",
            "transformers",
            "import transformers; print(transformers.__version__)",
            "pip install 'bpkv-trt[hf]'",
        ),
        *(partial(_package, f"{name} weights", each.package, each.install) for name, each in CATALOGUE.items()),
        lambda: _module(
            "Triton compiler",
            "triton",
            "import triton, triton.compiler; print(triton.__version__)",
            "pip install 'bpkv-trt[kernels]'; needed to run on a GPU and to compile kernels for engines, not on a CPU",
        ),
        _tensorrt,
        lambda: _module(
            "TensorRT-LLM",
            "tensorrt_llm",
            "from tensorrt_llm import __version__ as v; print(v)\n"
            "assert v.startswith(('1.0', '1.1', '1.2')), f'{v}: engines need TensorRT-LLM 1.0 to 1.2'",
            "pip install 'tensorrt-llm>=1.0,<1.3' beside an NVIDIA GPU; needed only to build and run engines",
        ),
        partial(_plugin_library, plugin_lib),
        _build_tools,
        *(
            partial(_package, name, package, f"pip install --no-deps {package}; {use}")
            for name, package, use in REHEARSAL
        ),
        _tritonserver,
    ]
    if engine is not None:
        checks.append(partial(engine_finding, engine, plugin_lib))
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(lambda check: check(), checks))


def print_findings(findings: list[Finding], console: Console) -> None:
    """A table on a terminal, one line per finding elsewhere."""
    if not console.is_terminal:
        for finding in findings:
            advice = f" [{finding.advice}]" if finding.advice else ""
            console.out(f"{finding.name}: {finding.status}: {finding.detail}{advice}", highlight=False)
        return
    table = Table("what", "status", "detail", "what to do")
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(Text(finding.name), status, Text(finding.detail), Text(finding.advice))
    console.print(table)


# A tritonserver tells no version, and ends with 1 also where it can say how it is used.
USAGE = """said=$("$1" --help 2>&1); case $said in Usage:*) echo "$1";; *) echo "$said" >&2; exit 1;; esac"""


def _probe(name: str, advice: str, *command: str) -> Finding:
    """Run a command that prints, last, what there is to say, and fails where the thing cannot be used."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"did not answer within {_TIMEOUT_S} s", advice)
    except OSError as error:
        return Finding(name, "broken", str(error), advice)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode == 0:
        return Finding(name, "ok", lines[-1].strip() if lines else "works")
    if done.returncode < 0:
        return Finding(name, "broken", f"crashed with signal {-done.returncode}", advice)
    return Finding(name, "broken", lines[-1].strip() if lines else f"exit code {done.returncode}", advice)


def _module(name: str, module: str, snippet: str, advice: str) -> Finding:
    """Import a module with `snippet`, which prints what there is to say of it and fails where it cannot be used."""
    if find_spec(module) is None:
        return Finding(name, "missing", f"the Python package {module} is not installed", advice)
    return _probe(name, f"reinstall it: {advice}", sys.executable, "-c", snippet)


def _package(name: str, package: str, advice: str) -> Finding:
    try:
        return Finding(name, "ok", f"{package} {version(package)}")
    except PackageNotFoundError:
        return Finding(name, "missing", f"the Python package {package} is not installed", advice)


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _memory() -> Finding:
    try:
        from bpkv_trt.host_memory import free_host_bytes
    except ImportError:
        advice = "pip install 'bpkv-trt[hf]'; it is checked before a run"
        return Finding("memory", "missing", "cannot be measured without the Python package psutil", advice)
    return Finding("memory", "ok", f"{free_host_bytes() / 2**30:.1f} GiB free")


def _cache_directory() -> Finding:
    root = user_cache_directory()
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        advice = "set BPKV_CACHE_DIR to a directory that can be written"
        return Finding("cache directory", "broken", f"{root} cannot be written to", advice)
    return Finding("cache directory", "ok", f"{root}, {shutil.disk_usage(existing).free / 2**30:.1f} GiB free")


def _gpu() -> Finding:
    advice = "not needed: everything but engines runs on a CPU; a GPU needs NVIDIA's driver and a CUDA build of PyTorch"
    if find_spec("torch") is None:
        return Finding("GPU", "missing", "cannot be looked for without PyTorch", advice)
    finding = _probe(
        "GPU",
        advice,
        sys.executable,
        "-c",
        "import torch\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "build = f'CUDA {torch.version.cuda}' if torch.version.cuda else 'a CPU build'\n"
        "print(', '.join(names) or f'none; this PyTorch is {build}')",
    )
    return Finding("GPU", "missing", finding.detail, advice) if finding.detail.startswith("none;") else finding


def _tensorrt() -> Finding:
    advice = "pip install tensorrt beside an NVIDIA GPU; needed only to build and run engines"
    library = ctypes.util.find_library("nvinfer")
    if find_spec("tensorrt") is not None or library is None:
        return _module("TensorRT", "tensorrt", "import tensorrt; print(tensorrt.__version__)", advice)
    snippet = f"import ctypes; print({library!r}, ctypes.CDLL({library!r}).getInferLibVersion())"
    return _probe("TensorRT", advice, sys.executable, "-c", snippet)


def _plugin_library(chosen: Path | None) -> Finding:
    from bpkv_trt.trtllm.plugin_library import PluginLibrary, locate

    name, advice = "plugin library", "needed only to build and run engines"
    try:
        path = locate(chosen)
    except InputError as error:
        return Finding(name, "missing", str(error), advice)
    try:
        library = PluginLibrary.find(path)
    except BpkvError as error:
        return Finding(name, "broken", str(error), advice)
    built = f"for TensorRT {library.sidecar.tensorrt}, targets {', '.join(library.sidecar.targets)}"
    snippet = f"import ctypes; ctypes.CDLL({str(library.path)!r}); print({f'{library.path}, {built}'!r})"
    return _probe(name, advice, sys.executable, "-c", snippet)


def engine_finding(folder: Path, plugin_lib: Path | None = None) -> Finding:
    """Whether the engine is the one that its sidecar tells of, and goes with the plugin library, TensorRT, TensorRT-LLM
    and the GPU here."""
    name = "engine"
    if os.path.isfile(folder):
        return Finding(
            name, "broken", f"{folder} is a file; give the engine's folder, {folder.parent}, to --engine-dir"
        )
    try:
        from bpkv_trt.trtllm.plugin_library import PluginLibrary
        from bpkv_trt.trtllm.sidecar import EngineSidecar

        sidecar, library, present = EngineSidecar.read(folder), PluginLibrary.find(plugin_lib), _engine_versions()
        sidecar.check_library(library)
        sidecar.check_versions(present)
        library.check_tensorrt(present.get("tensorrt", library.sidecar.tensorrt))
        capability = _compute_capability()
        if capability is not None:
            sidecar.settings.check_gpu(capability)
    except ImportError as error:
        return Finding(name, "broken", f"cannot be looked at without {error.name}", "pip install 'bpkv-trt[kernels]'")
    except BpkvError as error:
        return Finding(name, "broken", str(error))
    kernels = f"kernels for {', '.join(sidecar.settings.targets)}"
    gpu = "and no GPU here that could run them" if capability is None else "which the GPU here runs"
    return Finding(name, "ok", f"{folder}, {kernels}, {gpu}")


def _engine_versions() -> dict[str, str]:
    """Of the packages that engines are bound to, where they are installed."""
    present = {}
    for package in ("tensorrt", "tensorrt_llm"):
        with suppress(PackageNotFoundError):
            present[package] = version(package)
    return present


def _compute_capability() -> tuple[int, int] | None:
    """Of the first GPU; None where PyTorch sees none."""
    if find_spec("torch") is None:
        return None
    snippet = "import torch; print(*torch.cuda.get_device_capability(0))"
    finding = _probe("compute capability", "", sys.executable, "-c", snippet)
    numbers = finding.detail.split()
    return (int(numbers[0]), int(numbers[1])) if finding.status == "ok" else None


def _build_tools() -> Finding:
    compiler = (os.environ.get("CXX") or "c++").split()[0]  # a wrapper may come first, as in CXX="ccache g++"
    absent = [tool for tool in (compiler, "cmake") if shutil.which(tool) is None]
    if absent:
        advice = "install g++ 9 and cmake 3.22, or newer; needed only to build and test the plugin library"
        return Finding("C++ build tools", "missing", f"no {' and no '.join(absent)} on the PATH", advice)
    return Finding("C++ build tools", "ok", f"{compiler} and cmake")


def _tritonserver() -> Finding:
    binary = shutil.which("tritonserver", path=f"{os.environ.get('PATH', os.defpath)}:/opt/tritonserver/bin")
    advice = "use NVIDIA's tritonserver container, or docs/serving.md's for trying; needed only to serve"
    if binary is None:
        return Finding("Triton server", "missing", "no tritonserver on the PATH", advice)
    return _probe("Triton server", advice, "sh", "-c", USAGE, "sh", binary)
