import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bpkv_trt.models.loading import LoadedModel, load_model
from tests.tensorrt_folder import tensorrt_folder
from tests.trtllm.runner_place import LLAMA, RunnerPlace

DESCRIBE = Path(__file__).parent / "describe_tensorrt.py"


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
    environment = tensorrt_folder(tmp_path_factory.mktemp("tensorrt"))
    run = subprocess.run([sys.executable, DESCRIBE], env=environment, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def place(
    trt: ModuleType, tensorrt_10: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunnerPlace]:
    """An engine to be run, with TensorRT-LLM installed, where a file has no place of its own."""
    made = RunnerPlace(trt, tensorrt_10, tmp_path_factory.mktemp("runner"))
    with made.installed():
        yield made


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """The model of that engine, for the torch host."""
    return load_model(str(LLAMA))
