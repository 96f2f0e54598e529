"""NVIDIA's Python bindings of TensorRT 10 where there is no TensorRT: over the library that has its registry alone."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

# What the bindings ask of libraries that only NVIDIA's own index has: a builder and a parser. None of it is called.
STUBS = """
void *createInferBuilder_INTERNAL(void) { return 0; }
void *getBuilderPluginRegistry(void) { return 0; }
int initLibNvInferPlugins(void) { return 0; }
void *createNvOnnxParser_INTERNAL(void) { return 0; }
void *createNvOnnxParserRefitter_INTERNAL(void) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
"""


def dispatch_library() -> Path:
    """NVIDIA's dispatch library, or the test is skipped."""
    package = find_spec("tensorrt_dispatch_libs")
    if package is None or package.origin is None:
        pytest.skip("needs the package tensorrt_dispatch_cu13_libs")
    return Path(package.origin).parent / "libnvinfer_dispatch.so.10"


def tensorrt_folder(folder: Path) -> dict[str, str]:
    """Fill a folder with the libraries that `import tensorrt_bindings` loads; the environment for a process that does.

    A process of its own: TensorRT-RTX, which other tests load, has a registry too.
    """
    if find_spec("tensorrt_bindings") is None or shutil.which("cc") is None:  # importing it here would load them
        pytest.skip("needs the package tensorrt_cu13_bindings and a C compiler")
    source, stubs = folder / "stubs.c", folder / "libnvinfer_plugin.so.10"
    source.write_text(STUBS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", stubs, source], check=True)
    (folder / "libnvonnxparser.so.10").symlink_to(stubs)
    (folder / "libnvinfer.so.10").symlink_to(dispatch_library())
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}
