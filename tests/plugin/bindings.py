"""NVIDIA's Python bindings of TensorRT over its own registry, as the module `tensorrt`; there is no builder."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import ModuleType

LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
MAJOR = 10


def stand_in_libraries(folder: Path, dispatch: Path) -> None:
    """The three libraries that the bindings load; the first one brings NVIDIA's dispatch library with it."""
    source = Path(__file__).with_name("stand_in_nvinfer.c")
    for name in LIBRARIES:
        file = f"{name}.so.{MAJOR}"
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", str(folder / file), str(source)]
        if name == "libnvinfer":
            command += ["-Wl,--no-as-needed", str(dispatch), f"-Wl,-rpath,{dispatch.parent}"]
        subprocess.run(command, check=True)


def import_tensorrt(folder: Path) -> ModuleType:
    """The bindings; the process is theirs from then on."""
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / f"{name}.so.{MAJOR}"), mode=ctypes.RTLD_GLOBAL)
    import tensorrt_bindings

    sys.modules["tensorrt"] = tensorrt_bindings
    return tensorrt_bindings
