"""A trained model's engine in a folder with a plugin library, where the command and its runner find them."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import load_model
from bpkv_trt.runtime import engine_runner
from bpkv_trt.trtllm.plugin_library import PluginLibrary
from bpkv_trt.trtllm.settings import for_engine
from tests.trtllm.build_place import save_library
from tests.trtllm.built_network import engine_settings
from tests.trtllm.checked_tensorrt import Description
from tests.trtllm.session_place import SessionPlace

LLAMA = Path(__file__).parents[1] / "assets" / "tiny-llama"
FRESH = ("bpkv_trt.runtime.trtllm_session", "bpkv_trt.runtime.engine_ports")  # they import TensorRT-LLM
TENSORRT, TENSORRT_LLM = "10.14.1", "1.2.1"
LIMITS = {"max_batch_size": 3, "max_input_len": 400, "max_seq_len": 480, "max_num_tokens": 600}
# What the engine compacts with, as its build was told; on a CPU the same are options of the command.
BUILT = {"budget": "0.3", "sinks": 2, "recent": 12, "positions": 4, "top_k": 8, "page_size": 8, "refine": 16}


class RunnerPlace:
    """All of it is read only, but for copies of `folder`."""

    def __init__(self, trt: ModuleType, tensorrt_10: Description, scratch: Path) -> None:
        self.library = save_library(scratch / "library")
        sha256 = PluginLibrary.find(self.library).sidecar.sha256
        config = for_engine(BpkvConfig(**BUILT))
        settings = engine_settings().model_copy(update={"config": config, "plugin_sha256": sha256})
        loaded = load_model(str(LLAMA))
        self.session_place = SessionPlace(trt, tensorrt_10, loaded, settings=settings, page_size=8, **LIMITS)
        self.fakes = self.session_place.fakes
        assert self.fakes.tensorrt is not None
        self.fakes.tensorrt.__version__ = TENSORRT  # type: ignore[attr-defined]
        folder = scratch / "engine"
        folder.mkdir()
        self.folder = self.session_place.save(folder, {"tensorrt": TENSORRT, "tensorrt_llm": TENSORRT_LLM})

    @contextmanager
    def installed(self) -> Iterator[None]:
        """TensorRT-LLM is, and the CPU stands in for a GPU."""
        with self.session_place.installed(*FRESH), pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_runner, "find_gpu", lambda: torch.device("cpu"))
            patch.setenv("BPKV_PLUGIN_PATH", str(self.library))
            yield

    def open(self, **options: Any) -> engine_runner.EngineRunner:
        return engine_runner.EngineRunner.open(self.folder, options=options)

    @staticmethod
    def session_module() -> ModuleType:
        return importlib.import_module(FRESH[0])
