import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.serving_host import open_batch
from bpkv_trt.runtime.serving_loop import ServingLoop
from bpkv_trt.serving_settings import ServingSettings
from tests.runtime.received import PATIENCE
from tests.tensorrt_folder import tensorrt_folder
from tests.trtllm.runner_place import LLAMA, RunnerPlace
from tests.trtllm.served_engine import OPTIONS, Alone

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


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer without a token that ends answers."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(LLAMA / "tokenizer.json", folder)
    options = json.loads((LLAMA / "tokenizer_config.json").read_text())
    del options["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


@pytest.fixture
def make_loop(place: RunnerPlace, endless: Path) -> Iterator[Callable[..., ServingLoop]]:
    """Loops whose last batch has ended when the test is done."""
    loops = list[ServingLoop]()

    def make(queue_limit: int = 64, **settings: Any) -> ServingLoop:
        served: dict[str, Any] = {"engine": str(place.folder), "tokenizer": str(endless), "options": OPTIONS}
        batch, words = open_batch(ServingSettings(**{**served, **settings}), Trace())
        loops.append(ServingLoop(batch, words, queue_limit=queue_limit))
        return loops[-1]

    yield make
    for loop in loops:
        loop.shutdown(PATIENCE)
        assert not loop.healthy and not loop.batch.waiting and not loop.batch.running
        gauges = loop.metrics.snapshot().gauges
        assert all(gauges[f"bpkv_{name}"] == 0 for name in ("pages_live", "pages_free", "running", "queue_length"))


@pytest.fixture(scope="module")
def alone(place: RunnerPlace, loaded: LoadedModel, endless: Path) -> Alone:
    return Alone(place, loaded, endless)
