"""The inputs and outputs that BP-KV adds to an engine of TensorRT-LLM, and the memory that they are bound to."""

from collections.abc import Mapping
from typing import Any

import torch
from tensorrt_llm.runtime.generation import RuntimeTensor
from torch import Tensor

from bpkv_trt.errors import ConfigError

INPUTS = ("bpkv_score_rows", "bpkv_score_offsets", "bpkv_score_weights", "bpkv_pool_pointers")
BY_LAYER, BY_SEQUENCE = ("q", "context", "scores"), "bpkv_scores_"
ONCE = ("bpkv_topk_ids", "bpkv_topk_p", "bpkv_covered_mass", "bpkv_residual", "bpkv_readout")
TYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32}
ALIGNMENT = 256  # bytes, of what TensorRT is given


class EnginePorts:
    """As the engine describes them: which it has, of which type and shape, and how many rows a run may score.

    TensorRT takes no null address, which an empty tensor of torch has, so that nothing to score is bound to memory too.
    """

    def __init__(self, engine: Any, layers: int, device: torch.device) -> None:
        """engine: trt.ICudaEngine. Raises ConfigError where it lacks one of them or has others."""
        self._engine, self._device = engine, device
        self.outputs = [f"bpkv_{name}_{layer}" for layer in range(layers) for name in BY_LAYER] + list(ONCE)
        found = {name for name in map(engine.get_tensor_name, range(engine.num_io_tensors)) if name.startswith("bpkv_")}
        if found != (wanted := {*INPUTS, *self.outputs}):
            lacking, strange = sorted(wanted - found), sorted(found - wanted)
            what = f"lacks {', '.join(lacking[:3])}" if lacking else f"has {', '.join(strange[:3])}, unknown here"
            raise ConfigError(
                f"The engine {what}: it was not built by this version of bpkv. Build it again with "
                "`bpkv-trtllm-build --plugin bpkv`."
            )
        self._nothing = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self.bound: dict[str, Tensor] = {}  # outputs of the run that was bound last

    @property
    def most_rows(self) -> int:
        """Positions that one run may score, over all its sequences."""
        return int(self._engine.get_tensor_profile_shape("bpkv_score_rows", 0)[2][0])

    def bind(self, inputs: Mapping[str, Tensor], sequences: int, longest: int) -> dict[str, RuntimeTensor]:
        """RuntimeTensors of a run: these inputs, and memory for its outputs, which are then `bound`.

        longest: rows that a sequence's table of blocks can hold.
        """
        rows = inputs["bpkv_score_rows"].shape[0]
        self.bound = {name: self._output(name, rows, sequences, longest if rows else 0) for name in self.outputs}
        return {name: self._runtime_tensor(name, data) for name, data in {**inputs, **self.bound}.items()}

    def _output(self, name: str, rows: int, sequences: int, longest: int) -> Tensor:
        own = [int(size) for size in self._engine.get_tensor_shape(name)]
        shape = [sequences, own[1], longest] if name.startswith(BY_SEQUENCE) else [rows, *own[1:]]
        return torch.empty(shape, dtype=TYPES[self._engine.get_tensor_dtype(name).name], device=self._device)

    def _runtime_tensor(self, name: str, data: Tensor) -> RuntimeTensor:
        if data.numel():
            return RuntimeTensor.from_torch(name, data)
        return RuntimeTensor.from_torch(name, self._nothing.view(data.dtype)[:1], override_shape=list(data.shape))
