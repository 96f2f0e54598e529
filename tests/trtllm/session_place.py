"""A small model's engine and TensorRT-LLM's Python runtime around it, on the CPU: where sessions are tested."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trtllm.built_network import Built
from tests.trtllm.checked_tensorrt import Description
from tests.trtllm.network_walk import torch_types
from tests.trtllm.stock_build import KVCacheType
from tests.trtllm.stock_generation import session_implementations
from tests.trtllm.stock_pools import PoolMemories
from tests.trtllm.stock_runtime import runtime_implementations
from tests.trtllm.torch_engine import TorchEngine

BUFFER = b"engine"  # in place of an engine's bytes
NO_TOKEN = -1


class SessionPlace:
    """The engine is built once; any number of sessions may run on it, one after another or in turns.

    Everything that uses `tensorrt_llm` happens while it is `installed`.
    """

    def __init__(self, trt: ModuleType, tensorrt_10: Description, name: str = "llama", **options: Any) -> None:
        """options: of `Built` (settings, dtype), and of the build (max_batch_size, max_num_tokens, ..)."""
        own = {key: options.pop(key) for key in ("settings", "dtype") if key in options}
        with pytest.MonkeyPatch.context() as patch:
            self.built = Built(trt, tensorrt_10, name, **own).build(patch, **options)
        self.options = {"max_batch_size": 4, "max_beam_width": 1} | options
        self.fakes = self.built.stock.fakes
        self.memories = PoolMemories()
        self.engine = TorchEngine(self.built.stock, self.memories)
        self.fakes.implement(
            session_implementations()
            | runtime_implementations({BUFFER: self.engine}, torch_types(trt))
            | self.memories.implementations()
            | {"tensorrt_llm.quantization.mode.QuantMode.has_kv_cache_quant": lambda self: bool(self)}
        )

    @contextmanager
    def installed(self, *fresh: str) -> Iterator["SessionPlace"]:
        """fresh: modules of ours that import TensorRT-LLM, imported anew inside."""
        with self.fakes.installed(*fresh):
            yield self

    def model_config(self, **changes: Any) -> Any:
        own = self.built.loaded.model.config
        given = {
            **{name: self.options[name] for name in ("max_batch_size", "max_beam_width")},
            **{"vocab_size": own.vocab_size, "num_layers": own.num_hidden_layers, "hidden_size": own.hidden_size},
            **{"num_heads": own.num_attention_heads, "num_kv_heads": own.num_key_value_heads},
            **{"head_size": own.head_dim, "dtype": self.built.stock.dtype, "kv_cache_type": KVCacheType.PAGED},
            **{"gpt_attention_plugin": True, "remove_input_padding": True},
            "tokens_per_block": self.built.memory.page_size,
        }
        return self.fakes["tensorrt_llm.runtime.generation.ModelConfig"](**given | changes)

    def session(self, kind: type | None = None, **options: Any) -> Any:
        """A session of a class, the stock one by itself."""
        made = self.fakes["tensorrt_llm.runtime.generation.GenerationSession"] if kind is None else kind
        return made(self.model_config(), BUFFER, self.fakes["tensorrt_llm.mapping.Mapping"](), **options)

    def sampling(self, **changes: Any) -> Any:
        """Greedy, and without an end."""
        kind = self.fakes["tensorrt_llm.runtime.generation.SamplingConfig"]
        return kind(**{"end_id": NO_TOKEN, "pad_id": 0} | changes)

    def decode(self, session: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> Any:
        """What `decode` returns for a batch; options: its own, and `end_id`, `temperature`, .. of `sampling`."""
        names = self.fakes["tensorrt_llm.runtime.generation.SamplingConfig"].contract
        chosen = {name: options.pop(name) for name in list(options) if name in names and name not in DECODING}
        lengths = [len(prompt) for prompt in prompts]
        session.setup(len(prompts), max(lengths), new_tokens)
        packed = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
        return session.decode(packed, torch.tensor(lengths, dtype=torch.int32), self.sampling(**chosen), **options)


DECODING = ("stop_words_list", "bad_words_list", "output_sequence_lengths", "return_dict")  # options of `decode` too


def answers(output_ids: Tensor, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The tokens after each prompt. output_ids [B, 1, T]"""
    rows = output_ids[:, 0].tolist()
    return [row[len(prompt) :][:new_tokens] for row, prompt in zip(rows, prompts, strict=True)]
