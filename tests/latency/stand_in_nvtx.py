"""A library that plays a profiler for NVTX, built from source, and the ranges that it wrote down."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Range(NamedTuple):
    name: str
    payload: int | None
    parent: str | None


def build_stand_in(folder: Path) -> Path:
    """The library, for NVTX_INJECTION64_PATH; tests are skipped where it cannot be built."""
    pytest.importorskip("nvtx")
    compiler, include = shutil.which("g++"), headers()
    if compiler is None or include is None:
        pytest.skip("needs a C++ compiler (g++) and NVTX's headers (pip install nvidia-nvtx)")
    library = folder / "libstand_in_nvtx.so"
    source = ROOT / "plugins" / "tests" / "stand_in_nvtx.cpp"
    options = ["-std=c++17", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library), "-ldl"]
    subprocess.run([compiler, *options], check=True)
    return library


def headers() -> Path | None:
    """NVTX's, from the package nvidia-nvtx or from CUDA."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    folders = [*(folder for place in places for folder in place.glob("*/include")), Path("/usr/local/cuda/include")]
    return next((folder for folder in folders if (folder / "nvtx3" / "nvToolsExt.h").exists()), None)


def ranges_of(told: list[str]) -> list[Range]:
    """Ranges of the domain bpkv, in order of their beginning, from pushes and pops, which must be balanced."""
    around, found = list[str](), list[Range]()
    for line in told:
        match line.split():
            case ["bpkv", "push", name, payload]:
                found.append(Range(name, None if payload == "none" else int(payload), around[-1] if around else None))
                around.append(name)
            case ["bpkv", "pop"]:
                around.pop()
            case ["bpkv", *_]:
                raise AssertionError(line)
    assert around == [], "a range was never closed"
    return found
