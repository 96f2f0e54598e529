import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

DESCRIBE = Path(__file__).parent / "describe_tensorrt.py"
# What TensorRT's bindings ask of libraries that only NVIDIA's own index has. None of it is called.
STUBS = """
void* createInferBuilder_INTERNAL(void) { return 0; }
void* getBuilderPluginRegistry(void) { return 0; }
int initLibNvInferPlugins(void) { return 0; }
void* createNvOnnxParser_INTERNAL(void) { return 0; }
void* createNvOnnxParserRefitter_INTERNAL(void) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
"""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def trt() -> ModuleType:
    """TensorRT-RTX: the same network API, and a builder that needs no GPU."""
    return pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt_rtx_cu13_bindings and _libs")


@pytest.fixture(scope="session")
def tensorrt_10(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the bindings of TensorRT 10 define, which TensorRT-LLM makes its networks of: members, docstrings."""
    library = find_spec("tensorrt_dispatch_libs")
    compiler = shutil.which("cc")
    if find_spec("tensorrt_bindings") is None or library is None or compiler is None:
        pytest.skip("needs tensorrt_cu13_bindings, tensorrt_dispatch_cu13_libs and a C compiler")
    assert library.origin is not None
    folder = tmp_path_factory.mktemp("tensorrt")
    (folder / "stubs.c").write_text(STUBS)
    stubs = folder / "libnvinfer_plugin.so.10"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", stubs, folder / "stubs.c"], check=True)
    (folder / "libnvonnxparser.so.10").symlink_to(stubs)
    (folder / "libnvinfer.so.10").symlink_to(Path(library.origin).parent / "libnvinfer_dispatch.so.10")
    command = [sys.executable, str(DESCRIBE)]
    run = subprocess.run(
        command, env=os.environ | {"LD_LIBRARY_PATH": str(folder)}, check=True, capture_output=True, text=True
    )
    return json.loads(run.stdout)
