"""Evaluates a real TensorRT network on the CPU: what each of its layers says it does, done by torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Feed = Mapping[str, Tensor | Callable[[], Tensor]]


def largest(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    """Of numbers: NaN is lost."""
    return torch.where(x.isnan(), -torch.inf, x).amax(axis, keepdim)


ELEMENTWISE = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "MAX": torch.fmax,  # a GPU's maximum and minimum lose NaN
    "MIN": torch.fmin,
    "GREATER": torch.gt,
    "EQUAL": torch.eq,
}
UNARY = {"EXP": torch.exp, "LOG": torch.log, "SQRT": torch.sqrt, "RECIP": torch.reciprocal}
SIZES = {"slice": (2,)}  # inputs that say how large the output is
REDUCE = {"SUM": torch.sum, "AVG": torch.mean, "MAX": largest}


def torch_types(trt: ModuleType) -> dict[Any, torch.dtype]:
    """By TensorRT's."""
    return {
        trt.float32: torch.float32,
        trt.float16: torch.float16,
        trt.bfloat16: torch.bfloat16,
        trt.int32: torch.int32,
        trt.int64: torch.int64,
        trt.bool: torch.bool,
    }


class NetworkReading:
    """What a network's layers and inputs say of themselves. It does not change, so walks may share one."""

    def __init__(self, network: Any, trt: ModuleType) -> None:
        self.trt, self.dtypes = trt, torch_types(trt)
        self.sizes = (network.num_inputs, network.num_layers)
        self.tensors = {tensor.name: self._said(tensor) for tensor in map(network.get_input, range(network.num_inputs))}
        self.inputs = set(self.tensors)
        self.producers: dict[str, ReadLayer] = {}
        for layer in map(network.get_layer, range(network.num_layers)):
            inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
            outputs = [layer.get_output(index) for index in range(layer.num_outputs)]
            names = [None if each is None else each.name for each in inputs]
            read = ReadLayer(layer, str(layer.type).rpartition(".")[2].lower(), names, [each.name for each in outputs])
            for tensor in outputs:
                assert tensor.name not in self.producers, f"two tensors are called {tensor.name}"
                self.producers[tensor.name], self.tensors[tensor.name] = read, self._said(tensor)

    def still_of(self, network: Any) -> bool:
        return self.sizes == (network.num_inputs, network.num_layers)

    def check(self, name: str, value: Tensor) -> None:
        """What TensorRT says of the tensor holds for the value."""
        dtype, sizes = self.tensors[name]
        assert value.dtype == dtype, f"{name}: {value.dtype} for {dtype}"
        fits = len(sizes) == value.dim() and all(a in (-1, b) for a, b in zip(sizes, value.shape, strict=True))
        assert fits, f"{name}: {tuple(value.shape)} for {sizes}"

    def _said(self, tensor: Any) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.dtypes[tensor.dtype], tuple(tensor.shape)


@dataclass
class ReadLayer:
    layer: Any
    kind: str
    inputs: list[str | None]
    outputs: list[str]
    constant: Tensor | None = None


class NetworkWalk:
    """Tensors by name, each computed when it is asked for and kept.

    Inputs without values, on torch's device `meta`, give tensors without values: their shapes are what is wanted.
    """

    def __init__(self, reading: NetworkReading, feed: Feed) -> None:
        """feed: an input's value, or what gives it when a layer first needs it; a bf16 constant's, by its layer."""
        self.reading, self.trt, self.dtypes, self.feed = reading, reading.trt, reading.dtypes, feed
        self.known: dict[str, Tensor] = {}

    def __getitem__(self, tensor: Any) -> Tensor:
        return self._value(tensor.name)

    def _value(self, name: str) -> Tensor:
        if name not in self.known:
            if name in self.reading.inputs:
                given = self.feed[name]
                self._keep(name, given if isinstance(given, Tensor) else given())
            else:
                self._evaluate(self.reading.producers[name])
        return self.known[name]

    def _keep(self, name: str, value: Tensor) -> None:
        self.reading.check(name, value)
        self.known[name] = value

    def _evaluate(self, read: ReadLayer) -> None:
        evaluate = getattr(self, f"_{read.kind}", None)
        if evaluate is None:
            raise NotImplementedError(f"{read.layer.name} is a {read.kind} layer, which this walk does not know")
        if read.kind == "constant":
            results = self._constant(read)
        else:
            inputs = [None if name is None else self._value(name) for name in read.inputs]
            results = evaluate(read.layer, *without_values(inputs, but=SIZES.get(read.kind, ())))
        for name, result in zip(read.outputs, results if isinstance(results, tuple) else (results,), strict=True):
            self._keep(name, result)

    def _cast_to(self, layer: Any, kind: str) -> Any:
        layer.__class__ = getattr(self.trt, kind)  # how the bindings give a layer its own attributes
        return layer

    def _constant(self, read: ReadLayer) -> Tensor:
        if read.constant is None:
            layer = self._cast_to(read.layer, "IConstantLayer")
            if isinstance(layer.weights, self.trt.Weights):  # of a type that NumPy lacks
                return self.feed[layer.name]
            read.constant = torch.from_numpy(layer.weights.copy()).reshape(tuple(layer.shape))
        return read.constant

    def _cast(self, layer: Any, x: Tensor) -> Tensor:
        return x.to(self.dtypes[self._cast_to(layer, "ICastLayer").to_type])

    def _elementwise(self, layer: Any, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == y.dtype and x.dim() == y.dim(), f"{layer.name}: a strongly typed network refuses this"
        assert all(a == b or 1 in (a, b) for a, b in zip(x.shape, y.shape, strict=True))
        return ELEMENTWISE[self._cast_to(layer, "IElementWiseLayer").op.name](x, y)

    def _unary(self, layer: Any, x: Tensor) -> Tensor:
        return UNARY[self._cast_to(layer, "IUnaryLayer").op.name](x)

    def _activation(self, layer: Any, x: Tensor) -> Tensor:
        layer = self._cast_to(layer, "IActivationLayer")
        assert layer.type == self.trt.ActivationType.TANH
        return torch.tanh(x)

    def _select(self, layer: Any, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == y.dtype
        return torch.where(condition, x, y)

    def _reduce(self, layer: Any, x: Tensor) -> Tensor:
        layer = self._cast_to(layer, "IReduceLayer")
        return REDUCE[layer.op.name](x, self._one_axis(layer.axes), keepdim=layer.keep_dims)

    def _softmax(self, layer: Any, x: Tensor) -> Tensor:
        return torch.softmax(x, self._one_axis(self._cast_to(layer, "ISoftMaxLayer").axes))

    def _topk(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._cast_to(layer, "ITopKLayer")
        assert layer.op == self.trt.TopKOperation.MAX
        values, indices = torch.sort(x, dim=self._one_axis(layer.axes), descending=True, stable=True)
        indices = torch.where(values.isnan(), 2**31 - 1, indices)  # not said of NaN, so anything
        return values[..., : layer.k], indices[..., : layer.k].int()

    def _gather(self, layer: Any, x: Tensor, indices: Tensor) -> Tensor:
        layer = self._cast_to(layer, "IGatherLayer")
        if layer.mode == self.trt.GatherMode.ELEMENT:
            return torch.gather(x, layer.axis, indices.long())
        assert layer.mode == self.trt.GatherMode.DEFAULT and layer.num_elementwise_dims == 0
        taken = x.index_select(layer.axis, indices.flatten().long())
        return taken.reshape(*x.shape[: layer.axis], *indices.shape, *x.shape[layer.axis + 1 :])

    def _shape(self, layer: Any, x: Tensor) -> Tensor:
        return torch.tensor(x.shape)

    def _slice(self, layer: Any, x: Tensor, start: None, sizes: Tensor) -> Tensor:
        layer = self._cast_to(layer, "ISliceLayer")
        assert start is None and tuple(layer.stride) == (1,) * x.dim()
        for axis, (first, size) in enumerate(zip(layer.start, sizes.tolist(), strict=True)):
            x = x.narrow(axis, first, size)
        return x

    def _identity(self, layer: Any, x: Tensor) -> Tensor:
        return x

    def _concatenation(self, layer: Any, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self._cast_to(layer, "IConcatenationLayer").axis)

    def _matrix_multiply(self, layer: Any, x: Tensor, y: Tensor) -> Tensor:
        layer = self._cast_to(layer, "IMatrixMultiplyLayer")
        assert x.dtype == y.dtype and layer.op0 == self.trt.MatrixOperation.NONE
        y = y.T if layer.op1 == self.trt.MatrixOperation.TRANSPOSE else y
        return (x.float() @ y.float()).to(x.dtype)  # sums in fp32, rounded once

    def _shuffle(self, layer: Any, x: Tensor) -> Tensor:
        layer = self._cast_to(layer, "IShuffleLayer")
        assert layer.zero_is_placeholder
        sizes = [x.shape[index] if size == 0 else size for index, size in enumerate(layer.reshape_dims)]
        return x.reshape(sizes)

    def _one_axis(self, mask: int) -> int:
        axis = mask.bit_length() - 1
        assert mask == 1 << axis
        return axis


def without_values(inputs: list[Tensor | None], but: Sequence[int]) -> list[Tensor | None]:
    """All of them, if one is; sizes (`but` these inputs) keep theirs."""
    if not any(each is not None and each.is_meta for each in inputs):
        return inputs
    return [each if each is None or index in but else each.to("meta") for index, each in enumerate(inputs)]
