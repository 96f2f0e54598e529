"""What TensorRT-LLM's session keeps between itself and its engine: contexts, and tensors with the shapes to bind."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from tests.trtllm.contract.fakes import Implementation, implementations_of
from tests.trtllm.device_address import Address
from tests.trtllm.torch_engine import TorchContext, TorchEngine

MODULE = "tensorrt_llm.runtime.generation"


class RuntimeTensor:
    def from_torch(name: str, data: Tensor, override_shape: Any = None) -> Any:  # noqa: N805
        from tensorrt_llm.runtime.generation import RuntimeTensor as Kind

        assert isinstance(data, Tensor), f"data {name} is {type(data)}"
        made = Kind()
        made._name, made._held = name, data.contiguous()
        made._shape = list(data.shape) if override_shape is None else override_shape
        assert isinstance(made._shape, list | tuple) and prod(made._shape) <= data.numel()
        made._address = Address.of(made._held)
        return made

    def to_torch(self: Any) -> Tensor:
        return self._held  # type: ignore[no-any-return]

    name = property(lambda self: self._name)
    shape = property(lambda self: self._shape)
    data = property(lambda self: self._address)
    dtype = property(lambda self: self._held.dtype)


class Runtime:
    """`_Runtime`: the contexts of steps 0, 1, 3 .. and 2, 4 ..; with one profile the first is the last."""

    def set_tensors(self: Any, context: TorchContext, tensors: dict[str, Any]) -> None:
        """An output that is missing is made, and put into `tensors`; an input keeps what the context had."""
        from tensorrt_llm.runtime.generation import RuntimeTensor as Kind

        for name in self.input_tensor_names & tensors.keys():
            context.set_tensor_address(name, tensors[name].data)
            if list(context.get_tensor_shape(name)) != tensors[name].shape:
                context.set_input_shape(name, tensors[name].shape)  # what it returns is not looked at
        for name in self.output_tensor_names:
            if name not in tensors:
                dtype = self._dtypes[self.engine.get_tensor_dtype(name)]
                tensors[name] = Kind.from_torch(name, torch.zeros(context.get_tensor_shape(name), dtype=dtype))
            context.set_tensor_address(tensors[name].name, tensors[name].data)

    def run(self: Any, context: TorchContext, stream: Any = None) -> bool:
        return context.execute_async_v3(stream)

    def is_profiling(self: Any) -> bool:
        return False


def runtime_implementations(
    engines: Mapping[bytes, TorchEngine], dtypes: Mapping[Any, torch.dtype]
) -> dict[str, Implementation]:
    """engines: by what stands for their bytes. dtypes: torch's, by TensorRT's."""

    def start(self: Any, engine_buffer: bytes, mapping: Any) -> None:
        self.engine, self._dtypes = engines[engine_buffer], dtypes
        self.runtime_rank, self.profiler = mapping.rank, None
        names = {self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)}
        self.output_tensor_names = {name for name in names if self.engine.get_tensor_mode(name).name == "OUTPUT"}
        self.input_tensor_names = names - self.output_tensor_names
        self.context_0, self.context_1 = (self.engine.create_execution_context() for _ in range(2))
        self.ctx_context = self.context_1

    made: dict[str, Callable[..., Any]] = {
        "__init__": start,
        "_set_tensors": Runtime.set_tensors,
        "_run": Runtime.run,
        "_is_profiling": Runtime.is_profiling,
    }
    own: dict[str, Implementation] = {f"{MODULE}._Runtime.{name}": each for name, each in made.items()}
    return own | implementations_of(f"{MODULE}.RuntimeTensor", RuntimeTensor)
