"""A built network as an engine that torch runs on the CPU, by the names of TensorRT 10's engine and context."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.trtllm.attention_inputs import check_attention_inputs
from tests.trtllm.device_address import Address
from tests.trtllm.network_walk import torch_types
from tests.trtllm.stock import Stock
from tests.trtllm.stock_pools import PoolMemories

LOG = logging.getLogger("tensorrt")  # whose errors say why a call returned false
Shape = tuple[int, ...]


class TorchEngine:
    """ICudaEngine, of one optimization profile."""

    num_optimization_profiles = 1
    streamable_weights_size = 0

    def __init__(self, stock: Stock, memories: PoolMemories) -> None:
        self._stock, self._memories = stock, memories
        network, types = stock.network, torch_types(stock.trt)
        inputs = {tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))}
        self._inputs = {name: tensor for name, tensor in inputs.items() if name in stock.profiles}
        self._outputs = {tensor.name: tensor for tensor in stock.marked()}
        self._tensors = self._inputs | self._outputs
        self._dtypes = {name: types[tensor.dtype] for name, tensor in self._tensors.items()}
        self._profiles = {name: stock.profile(name) for name in self._inputs}
        self._known_sizes: dict[tuple[Shape, ...], dict[str, Shape]] = {}

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self._stock.trt.TensorIOMode
        return modes.INPUT if name in self._inputs else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return self._tensors[name].dtype

    def get_tensor_shape(self, name: str) -> Shape:
        """-1 for what is known at run time."""
        return tuple(self._tensors[name].shape)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        """Least, usual and largest shape of an input."""
        assert profile_index == 0
        return self._profiles[name]

    def create_execution_context(self) -> "TorchContext":
        return TorchContext(self)

    def _output_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """shapes: of all inputs."""
        key = tuple(shapes[name] for name in self._inputs)
        if key not in self._known_sizes:
            feed = {name: torch.empty(shapes[name], dtype=self._dtypes[name], device="meta") for name in self._inputs}
            outputs = self._stock.outputs(feed)
            self._known_sizes[key] = {name: tuple(value.shape) for name, value in outputs.items()}
        return self._known_sizes[key]

    def _run(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raises ValueError for inputs that the attention plugin cannot go by."""
        memory = self._stock.memory
        memory.pool = self._memories.at(int(feed["host_kv_cache_pool_pointers"][0, 0]))
        check_attention_inputs(feed, memory)
        return self._stock.outputs(feed)


class TorchContext:
    """IExecutionContext: tensors are bound by address, and read or written when it runs."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        said = {name: engine.get_tensor_shape(name) for name in engine._inputs}
        self._shapes = {name: shape for name, shape in said.items() if min(shape, default=0) >= 0}
        self._addresses: dict[str, int] = {}
        self._refused: dict[str, Shape] = {}

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        given = tuple(shape)
        low, _, high = self._engine._profiles[name]
        fits = len(given) == len(low) and all(a <= size <= b for a, size, b in zip(low, given, high, strict=True))
        if fits:
            self._shapes[name] = given
            self._refused.pop(name, None)
        else:
            LOG.error(f"{name}: a shape of {given} is not between {low} and {high}")
            self._refused[name] = given
        return fits

    def get_tensor_shape(self, name: str) -> Shape:
        """An output's once the shapes of all inputs are set."""
        engine = self._engine
        if name in engine._inputs:
            return self._shapes.get(name, engine.get_tensor_shape(name))
        if self._refused or engine._inputs.keys() - self._shapes:
            return engine.get_tensor_shape(name)
        return engine._output_shapes(self._shapes)[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert name in self._engine._tensors
        self._addresses[name] = memory
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def execute_async_v3(self, stream_handle: int) -> bool:
        try:
            self._execute()
        except ValueError as error:
            LOG.error(str(error))
            return False
        return True

    def _execute(self) -> None:
        engine = self._engine
        if self._refused:
            raise ValueError(f"shapes outside of the profile: {self._refused}")
        unknown = sorted(engine._inputs.keys() - self._shapes)
        if unknown:
            raise ValueError(f"the inputs {', '.join(unknown)} have no shape")
        inputs = {name: self._view(name, shape) for name, shape in self._shapes.items()}
        shapes = engine._output_shapes(self._shapes)
        outputs = {name: self._view(name, shape) for name, shape in shapes.items()}
        for name, value in engine._run(inputs).items():
            assert value.shape == shapes[name], f"{name}: {tuple(value.shape)}, and {shapes[name]} was said"
            outputs[name].copy_(value)

    def _view(self, name: str, shape: Shape) -> Tensor:
        address = self._addresses.get(name, 0)
        if not address:
            raise ValueError(f"{name}: each input and output must have a non-null address")
        assert isinstance(address, Address), f"{name}: {address} is no RuntimeTensor's"
        try:
            return address.view(self._engine._dtypes[name], shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
