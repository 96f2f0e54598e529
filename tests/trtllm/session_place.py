"""A small model's engine and TensorRT-LLM's Python runtime around it, on the CPU: where sessions are tested."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bpkv_trt.kernels.bundle import pack
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.models.weights import ModelWeights
from bpkv_trt.trtllm.network_record import KEY
from bpkv_trt.trtllm.projections import Projections
from bpkv_trt.trtllm.session_kernels import SessionKernels
from bpkv_trt.trtllm.sidecar import EngineSidecar
from tests.trtllm.built_network import Built, prepare
from tests.trtllm.checked_tensorrt import Description
from tests.trtllm.network_walk import torch_types
from tests.trtllm.stock_build import KVCacheType
from tests.trtllm.stock_generation import session_implementations
from tests.trtllm.stock_pools import PoolMemories
from tests.trtllm.stock_runner import SIZES, runner_implementations
from tests.trtllm.stock_runtime import runtime_implementations
from tests.trtllm.torch_engine import TorchEngine

BUFFER = b"engine"  # in place of an engine's bytes
NO_TOKEN = -1
GENERATION = "tensorrt_llm.runtime.generation"
OF_DECODE = ("stop_words_list", "bad_words_list", "output_sequence_lengths", "return_dict")  # and of a configuration


class SessionPlace:
    """The engine is built once; any number of sessions may run on it, one after another or in turns.

    Everything that uses `tensorrt_llm` happens while it is `installed`.
    """

    def __init__(
        self, trt: ModuleType, tensorrt_10: Description, name: str | LoadedModel = "llama", **options: Any
    ) -> None:
        """name: of a small model, or one that is loaded. options: of `Built`, and of the build (max_batch_size, ..)."""
        own = {key: options.pop(key) for key in ("settings", "dtype", "page_size") if key in options}
        with pytest.MonkeyPatch.context() as patch:
            self.built = Built(trt, tensorrt_10, name, **own).build(patch, **options)
        self.options = {"max_beam_width": 1} | prepare(**options)
        self.fakes = self.built.stock.fakes
        self.memories = PoolMemories()
        self.engine = TorchEngine(self.built.stock, self.memories)
        self.fakes.implement(
            session_implementations()
            | runtime_implementations({BUFFER: self.engine}, torch_types(trt))
            | self.memories.implementations()
            | runner_implementations()
        )

    @contextmanager
    def installed(self, *fresh: str) -> Iterator["SessionPlace"]:
        """fresh: modules of ours that import TensorRT-LLM, imported anew inside."""
        with self.fakes.installed(*fresh):
            yield self

    def engine_config(self) -> Any:
        names, stock = self.fakes.classes, self.built.stock
        plugins = names["tensorrt_llm.plugin.plugin.PluginConfig"](tokens_per_block=self.built.memory.page_size)
        sizes = {name: self.options[name] for name in SIZES}
        build = names["tensorrt_llm.builder.BuildConfig"](
            plugin_config=plugins, kv_cache_type=KVCacheType.PAGED, **sizes
        )
        record = getattr(self.built.model.config, KEY)
        pretrained = stock.config(**{"bpkv": self.built.settings.document(), KEY: record})
        return names["tensorrt_llm.builder.EngineConfig"](pretrained, build, "1.2.1")

    def save(self, folder: Path, versions: Mapping[str, str] | None = None) -> Path:
        """The engine's folder, as the build leaves it. versions: of what built it."""
        self.fakes["tensorrt_llm.builder.Engine"](self.engine_config(), BUFFER).save(str(folder))
        layers, weights = self.built.loaded.traits.layers, ModelWeights(self.built.loaded.model)
        Projections(tuple(weights.output_projection(layer)[0] for layer in range(layers))).save(folder, 0)
        SessionKernels(None, (), pack([], folder)).write(folder)  # none is launched on a CPU
        EngineSidecar.write(folder, self.built.settings, versions or {})
        return folder

    def session(self, kind: type | None = None, **options: Any) -> Any:
        """A session of a class, the stock one by itself."""
        made = self.fakes[f"{GENERATION}.GenerationSession"] if kind is None else kind
        to_model_config = self.fakes["tensorrt_llm.runtime.model_runner._engine_config_to_model_config"]
        model_config = to_model_config(self.engine_config(), gpu_weights_percent=1)
        return made(model_config, BUFFER, self.fakes["tensorrt_llm.mapping.Mapping"](), **options)

    def sampling(self, **changes: Any) -> Any:
        """Greedy, and without an end."""
        return self.fakes[f"{GENERATION}.SamplingConfig"](**{"end_id": NO_TOKEN, "pad_id": 0} | changes)

    def decode(self, session: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> Any:
        """What `decode` returns for a batch; options: its own, and those of `sampling`."""
        names = self.fakes[f"{GENERATION}.SamplingConfig"].contract
        chosen = {name: options.pop(name) for name in list(options) if name in names and name not in OF_DECODE}
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        session.setup(len(prompts), int(lengths.max()), new_tokens)
        packed = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
        return session.decode(packed, lengths, self.sampling(**chosen), **options)


def answers(output_ids: Tensor, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The tokens after each prompt. output_ids [B, 1, T]"""
    rows = output_ids[:, 0].tolist()
    return [row[len(prompt) :][:new_tokens] for row, prompt in zip(rows, prompts, strict=True)]
