"""Arithmetic on the tensors of a TensorRT network under construction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bpkv_trt.errors import BpkvError

# TensorRT's own classes; its modules (tensorrt, or tensorrt_rtx) are given by the caller and need not be installed.
Module: TypeAlias = Any
Network: TypeAlias = Any
ITensor: TypeAlias = Any
DataType: TypeAlias = Any
Operand: TypeAlias = "Value | float"


class Graph:
    """Adds layers to a strongly typed network; they are named bpkv/<part>/<kind>_<count>, as profilers show them."""

    def __init__(self, network: Network, trt: Module) -> None:
        """network: an `INetworkDefinition`, as TensorRT-LLM's `default_trtnet()` returns; trt: the module it is of."""
        self.network = network
        self.trt = trt
        self._part = "graph"
        self._count = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Layers that are added inside belong to this part."""
        outer, self._part = self._part, name
        try:
            yield
        finally:
            self._part = outer

    def value(self, tensor: ITensor) -> Value:
        return Value(self, tensor)

    def constant(self, array: NDArray[Any]) -> Value:
        """The array's values, of its shape; TensorRT reads them when it builds, and keeps the array until then."""
        weights = self.trt.Weights(np.ascontiguousarray(array))
        return self.output("constant", self.network.add_constant(array.shape, weights))

    def concatenate(self, values: Sequence[Value], axis: int) -> Value:
        layer = self.add("concatenate", self.network.add_concatenation([value.tensor for value in values]))
        layer.axis = axis
        return self.value(layer.get_output(0))

    def output(self, kind: str, layer: Any) -> Value:
        return self.value(self.add(kind, layer).get_output(0))

    def add(self, kind: str, layer: Any) -> Any:
        """Name a new layer. BpkvError where TensorRT gave none."""
        name = f"bpkv/{self._part}/{kind}_{self._count}"
        if layer is None:
            raise BpkvError(
                f"TensorRT refused the layer {name}; its log, above, says why. Please report both together with the "
                "model's configuration."
            )
        layer.name = name
        self._count += 1
        return layer


class Value:
    """A tensor of the network. Operators broadcast dimensions of size 1; both sides have one type and one rank."""

    def __init__(self, graph: Graph, tensor: ITensor) -> None:
        self.graph = graph
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """-1 where a size is known at run time alone."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> DataType:
        return self.tensor.dtype

    def like(self, operand: Operand) -> Value:
        """The operand itself, or a number as a constant that broadcasts to this value, of its type."""
        if isinstance(operand, Value):
            return operand
        kind = np.int32 if self.dtype == self.graph.trt.int32 else np.float32
        return self.graph.constant(np.full((1,) * len(self.shape), operand, kind)).cast(self.dtype)

    def __add__(self, other: Operand) -> Value:
        return self._elementwise("SUM", other)

    def __sub__(self, other: Operand) -> Value:
        return self._elementwise("SUB", other)

    def __rsub__(self, number: float) -> Value:
        return self.like(number) - self

    def __mul__(self, other: Operand) -> Value:
        return self._elementwise("PROD", other)

    def __gt__(self, other: Operand) -> Value:
        return self._elementwise("GREATER", other)

    def equals(self, other: Operand) -> Value:
        return self._elementwise("EQUAL", other)

    def clamp(self, low: float, high: float) -> Value:
        return self._elementwise("MAX", low)._elementwise("MIN", high)

    def where(self, condition: Value, other: Operand) -> Value:
        """This where the condition holds, the other elsewhere; what is not taken may be NaN."""
        layer = self.graph.network.add_select(condition.tensor, self.tensor, self.like(other).tensor)
        return self.graph.output("select", layer)

    def _elementwise(self, operation: str, other: Operand) -> Value:
        kind = getattr(self.graph.trt.ElementWiseOperation, operation)
        layer = self.graph.network.add_elementwise(self.tensor, self.like(other).tensor, kind)
        return self.graph.output(operation.lower(), layer)

    def exp(self) -> Value:
        return self._unary("EXP")

    def log(self) -> Value:
        return self._unary("LOG")

    def rsqrt(self) -> Value:
        return self._unary("SQRT")._unary("RECIP")

    def _unary(self, operation: str) -> Value:
        kind = getattr(self.graph.trt.UnaryOperation, operation)
        return self.graph.output(operation.lower(), self.graph.network.add_unary(self.tensor, kind))

    def tanh(self) -> Value:
        layer = self.graph.network.add_activation(self.tensor, self.graph.trt.ActivationType.TANH)
        return self.graph.output("tanh", layer)

    def sum(self, axis: int = -1) -> Value:
        """Reductions leave a dimension of size 1."""
        return self._reduce("SUM", axis)

    def mean(self) -> Value:
        return self._reduce("AVG", -1)

    def max(self) -> Value:
        return self._reduce("MAX", -1)

    def _reduce(self, operation: str, axis: int) -> Value:
        kind = getattr(self.graph.trt.ReduceOperation, operation)
        layer = self.graph.network.add_reduce(self.tensor, kind, self._axes(axis), keep_dims=True)
        return self.graph.output(f"reduce_{operation.lower()}", layer)

    def logsumexp(self) -> Value:
        """Over the last dimension, which becomes 1; NaN where a number is NaN or the largest is infinite."""
        largest = self.max()
        return (self - largest).exp().sum().log() + largest

    def softmax(self) -> Value:
        """Over the last dimension."""
        layer = self.graph.add("softmax", self.graph.network.add_softmax(self.tensor))
        layer.axes = self._axes(-1)
        return self.graph.value(layer.get_output(0))

    def topk(self, k: int) -> tuple[Value, Value]:
        """The k largest of the last dimension, descending, and their int32 indices.

        What TensorRT chooses where numbers are NaN is not said; the indices stay within the dimension, for a gather.
        """
        largest = self.graph.trt.TopKOperation.MAX
        layer = self.graph.add("topk", self.graph.network.add_topk(self.tensor, largest, k, self._axes(-1)))
        indices = self.graph.value(layer.get_output(1))
        return self.graph.value(layer.get_output(0)), indices.clamp(0, self.shape[-1] - 1)

    def gather(self, indices: Value, axis: int = 0) -> Value:
        """The slices of a dimension at int32 indices, whose shape takes its place."""
        return self.graph.output("gather", self.graph.network.add_gather(self.tensor, indices.tensor, axis))

    def gather_elements(self, indices: Value) -> Value:
        """[S, N] at [S, K] int32: row by row."""
        mode = self.graph.trt.GatherMode.ELEMENT
        layer = self.graph.add("gather", self.graph.network.add_gather_v2(self.tensor, indices.tensor, mode))
        layer.axis = 1
        return self.graph.value(layer.get_output(0))

    def part(self, start: int, count: int, axis: int) -> Value:
        """`count` slices of a dimension, from `start` on; other dimensions may be known at run time alone."""
        network, rank = self.graph.network, len(self.shape)
        chosen = np.arange(rank) == axis
        sizes = self.graph.output("shape", network.add_shape(self.tensor))
        size = sizes * self.graph.constant((~chosen).astype(np.int64)) + self.graph.constant(chosen * np.int64(count))
        layer = network.add_slice(self.tensor, tuple(map(int, chosen * start)), (0,) * rank, (1,) * rank)
        layer.set_input(2, size.tensor)
        return self.graph.output("slice", layer)

    def matmul(self, other: Value, *, transpose: bool = False) -> Value:
        """[M, d] @ [d, N], or @ [N, d] transposed; both of one type, which the product has."""
        none, transposed = self.graph.trt.MatrixOperation.NONE, self.graph.trt.MatrixOperation.TRANSPOSE
        operation = transposed if transpose else none
        layer = self.graph.network.add_matrix_multiply(self.tensor, none, other.tensor, operation)
        return self.graph.output("matmul", layer)

    def reshape(self, *sizes: int) -> Value:
        """0 keeps the size that stands there; -1, once, is what is left."""
        layer = self.graph.add("reshape", self.graph.network.add_shuffle(self.tensor))
        layer.reshape_dims = sizes
        return self.graph.value(layer.get_output(0))

    def cast(self, dtype: DataType) -> Value:
        if self.dtype == dtype:
            return self
        return self.graph.output("cast", self.graph.network.add_cast(self.tensor, dtype))

    def _axes(self, axis: int) -> int:
        return int(1 << (axis % len(self.shape)))
