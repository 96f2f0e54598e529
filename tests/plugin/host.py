"""TensorRT's part, played by `plugins/tests/host.cpp`, around NVIDIA's own registry."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# nvinfer1::DataType and nvinfer1::PluginFieldType
DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.bool: 4,
    torch.uint8: 5,
    torch.bfloat16: 7,
    torch.int64: 8,
}
FLOAT32, INT32, CHAR, UNKNOWN, INT64 = 1, 5, 6, 8, 10
MOST_DIMS = 8
BUILD, RUNTIME = 0, 1


class HostTensor(ctypes.Structure):
    _fields_ = [("type", c_int32), ("rank", c_int32), ("dims", c_int64 * MOST_DIMS), ("max", c_int64 * MOST_DIMS)]

    @classmethod
    def of(cls, tensor: Tensor) -> "HostTensor":
        shape = (c_int64 * MOST_DIMS)(*tensor.shape)
        return cls(DATA_TYPES[tensor.dtype], tensor.dim(), shape, shape)


class HostField(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32)]


@dataclass
class Field:
    """A plugin field by value."""

    name: str
    type: int
    data: bytes
    length: int

    def as_host(self) -> HostField:
        self._kept = ctypes.create_string_buffer(self.data, len(self.data))
        return HostField(self.name.encode(), ctypes.cast(self._kept, c_void_p), self.type, self.length)


FIELD_BYTES = {FLOAT32: 4, INT32: 4, INT64: 8, CHAR: 1, UNKNOWN: 1}


class Host:
    """The registry of the process, and plugins made by it."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library))
        tensors = POINTER(HostTensor)
        for name, result, arguments in (
            ("host_registry", c_void_p, []),
            ("host_load_library", c_void_p, [c_char_p]),
            ("host_deregister", c_int, [c_void_p]),
            ("host_creator", c_void_p, [c_char_p, c_char_p, c_char_p]),
            ("host_creator_field_count", c_int, [c_void_p]),
            ("host_creator_field_name", c_char_p, [c_void_p, c_int]),
            ("host_create", c_void_p, [c_void_p, POINTER(HostField), c_int, c_int]),
            ("host_fields", c_int, [c_void_p, POINTER(HostField), c_int]),
            ("host_clone", c_void_p, [c_void_p]),
            ("host_destroy", None, [c_void_p]),
            ("host_supports", c_int, [c_void_p, tensors, c_int, c_int]),
            ("host_output_type", c_int, [c_void_p, tensors, c_int]),
            ("host_output_dims", c_int, [c_void_p, tensors, c_int, POINTER(c_int64)]),
            ("host_configure", c_int, [c_void_p, tensors, c_int, c_int]),
            ("host_workspace", c_int64, [c_void_p, tensors, c_int, c_int]),
            ("host_attach", c_void_p, [c_void_p]),
            ("host_shape_change", c_int, [c_void_p, tensors, c_int, c_int]),
            ("host_enqueue", c_int, [c_void_p, tensors, c_int, c_int, POINTER(c_void_p), c_void_p, c_void_p]),
        ):
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments

    def creator(self, name: str = "BpkvScore", version: str = "1", namespace: str = "bpkv") -> int | None:
        return self.c.host_creator(name.encode(), version.encode(), namespace.encode())

    def create(self, fields: Sequence[Field], phase: int = BUILD) -> "Plugin | None":
        """None where the plugin refuses."""
        array = (HostField * len(fields))(*(field.as_host() for field in fields))
        made = self.c.host_create(self.creator(), array, len(fields), phase)
        return Plugin(self, made) if made else None


class Plugin:
    """One IPluginV3."""

    def __init__(self, host: Host, handle: int) -> None:
        self.host, self.handle = host, handle

    def fields(self) -> list[Field]:
        """What it serializes, copied."""
        array = (HostField * 32)()
        count = self.host.c.host_fields(self.handle, array, len(array))
        return [
            Field(
                each.name.decode(),
                each.type,
                ctypes.string_at(each.data, each.length * FIELD_BYTES[each.type]),
                each.length,
            )
            for each in array[:count]
        ]

    def clone(self) -> "Plugin":
        return Plugin(self.host, self.host.c.host_clone(self.handle))

    def attach(self) -> "Plugin":
        return Plugin(self.host, self.host.c.host_attach(self.handle))

    def destroy(self) -> None:
        self.host.c.host_destroy(self.handle)

    def supports(self, inputs: Sequence[Tensor], output: Tensor) -> bool:
        return bool(self.host.c.host_supports(self.handle, _described([*inputs, output]), len(inputs), 1))

    def output_type(self, inputs: Sequence[Tensor]) -> int:
        return self.host.c.host_output_type(self.handle, _described(inputs), len(inputs))

    def output_shape(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        dims = (c_int64 * MOST_DIMS)()
        rank = self.host.c.host_output_dims(self.handle, _described(inputs), len(inputs), dims)
        assert rank >= 0, "getOutputShapes refused"
        return tuple(dims[:rank])

    def configure(self, inputs: Sequence[Tensor], output: Tensor) -> int:
        return self.host.c.host_configure(self.handle, _described([*inputs, output]), len(inputs), 1)

    def workspace_bytes(self, inputs: Sequence[Tensor], output: Tensor) -> int:
        return self.host.c.host_workspace(self.handle, _described([*inputs, output]), len(inputs), 1)

    def shape_change(self, inputs: Sequence[Tensor], output: Tensor) -> int:
        return self.host.c.host_shape_change(self.handle, _described([*inputs, output]), len(inputs), 1)

    def enqueue(self, inputs: Sequence[Tensor], output: Tensor, workspace: Tensor) -> int:
        tensors = [*inputs, output]
        pointers = (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        return self.host.c.host_enqueue(
            self.handle, _described(tensors), len(inputs), 1, pointers, workspace.data_ptr(), None
        )

    def run(self, inputs: Sequence[Tensor], output: Tensor | None = None) -> Tensor:
        """Shape change and enqueue as an execution context does them; what is not written stays NaN."""
        output = torch.full(self.output_shape(inputs), torch.nan) if output is None else output
        workspace = torch.full((self.workspace_bytes(inputs, output) // 4,), torch.nan)
        assert self.shape_change(inputs, output) == 0
        assert self.enqueue(inputs, output, workspace) == 0
        return output


def _described(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (HostTensor * len(tensors))(*map(HostTensor.of, tensors))
