import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tests.kernels.interpreter  # noqa: F401
from bpkv_trt.kernels.bundle import unpack, unsealed
from bpkv_trt.kernels.configuration import score_launches, session_launches
from tests.plugin.configurations import CONFIGURATIONS, SESSIONS
from tests.plugin.host import Host
from tests.plugin.stand_in_driver import StandInDriver
from tests.tensorrt_folder import dispatch_library

ROOT = Path(__file__).resolve().parents[2]
COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder that one of the processes of this run fills, by a command that gets its path, and all use."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def make(name: str, *command: str | Path, environment: dict[str, str] = COMPILED) -> Path:
        folder = shared / name
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                folder.mkdir(exist_ok=True)
                command = tuple(str(part).replace("{folder}", str(folder)) for part in command)
                done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout + done.stderr
                (folder / "complete").touch()
        return folder

    return make


@pytest.fixture(scope="session")
def build_environment() -> dict[str, str]:
    """Headers come from the packages beside this Python, unless a TensorRT is named; so does CMake, if need be."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler (g++)")
    return COMPILED | {"PYTHON": sys.executable, "PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}"}


@pytest.fixture(scope="session")
def plugin(made_once: Callable[..., Path], build_environment: dict[str, str]) -> Path:
    """The library, by the one command that builds it."""
    command = ("bash", "build_scripts/build_plugin.sh", "--output", "{folder}")
    return made_once("plugin", *command, environment=build_environment) / "libbpkv_plugin.so"


@pytest.fixture(scope="session")
def native_build(made_once: Callable[..., Path], build_environment: dict[str, str]) -> Callable[[str, str], Path]:
    """The C++ tests, the host and the stand-in driver, with sanitizers or without."""

    def build(name: str, sanitizers: str) -> Path:
        kind = "Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0" if sanitizers else "Release"
        script = (
            "options=$(bash build_scripts/build_plugin.sh --cmake-options) && "
            f"cmake -S plugins -B {{folder}} -DBPKV_TESTS=ON -DBPKV_SANITIZE={sanitizers} "
            f"-DCMAKE_BUILD_TYPE={kind} $options && "
            "cmake --build {folder} --parallel 2"
        )
        return made_once(f"native-{name}", "bash", "-c", script, environment=build_environment)

    return build


@pytest.fixture(scope="session")
def native(native_build: Callable[[str, str], Path]) -> Path:
    return native_build("plain", "")


@pytest.fixture(scope="session")
def bundle_files(made_once: Callable[..., Path]) -> dict[str, Path]:
    script = Path(__file__).with_name("compile_bundles.py")
    folder = made_once("bundles", sys.executable, script, "{folder}", environment=COMPILED | {"PYTHONPATH": str(ROOT)})
    return {name: folder / f"{name}.bundle" for name in CONFIGURATIONS}


@pytest.fixture(scope="session")
def session_files(bundle_files: dict[str, Path]) -> dict[str, Path]:
    """The kernels of sessions, as they lie beside an engine."""
    return {name: bundle_files["fp32"].with_name(f"{name}.kernels") for name in SESSIONS}


@pytest.fixture(scope="session")
def bundles(bundle_files: dict[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in bundle_files.items()}


@pytest.fixture(scope="session")
def _stand_in(native: Path, bundles: dict[str, bytes], session_files: dict[str, Path]) -> StandInDriver:
    driver = StandInDriver(native / "stand_in" / "libcuda.so.1")
    for name, configuration in CONFIGURATIONS.items():
        _, kernels = unpack(bundles[name])
        driver.knows(kernels, score_launches(configuration))
    for name, configuration in SESSIONS.items():
        _, kernels = unpack(unsealed(session_files[name].read_bytes()))
        driver.knows(kernels, session_launches(configuration))
    return driver


@pytest.fixture
def driver(_stand_in: StandInDriver) -> Iterator[StandInDriver]:
    """Nothing that an earlier test loaded is left in it."""
    _stand_in.reset()
    yield _stand_in
    assert _stand_in.count("live") == 0, "kernels outlive the plugins"


@pytest.fixture(scope="session")
def host(native: Path, plugin: Path, _stand_in: StandInDriver) -> Host:
    """With the plugin's library loaded by NVIDIA's registry."""
    ctypes.CDLL(str(dispatch_library()), mode=ctypes.RTLD_GLOBAL)
    result = Host(native / "tests" / "libbpkv_host.so")
    assert result.creator() is None, "no plugin before its library is loaded"
    assert result.c.host_load_library(str(plugin).encode())
    return result
