"""CUDA's driver, played by `plugins/tests/stand_in_cuda.cpp`: launches run in Triton's interpreter, on the same memory.

Which kernel a launch means is known by the cubin that was loaded, byte for byte.
"""

import ctypes
import hashlib
import threading
import traceback
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bpkv_trt.kernels.aot import Variant
from bpkv_trt.kernels.launch import Launch
from tests.plugin.bundle_reader import BundledKernel

TYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*i64": torch.int64,
    "*i32": torch.int32,
}
LAUNCH = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_char_p, c_int, POINTER(c_uint), c_uint, c_uint, c_void_p, POINTER(c_void_p)
)
OPERANDS = ("TYPE", "KEY_TYPE", "VALUE_TYPE")  # fp32 in the interpreter, whose product of bf16 is wrong


@dataclass(frozen=True)
class Launched:
    """What the driver was asked for."""

    kernel: str
    device: int
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    arguments: dict[str, Any]  # by the kernel's names: addresses and numbers
    constants: dict[str, str]


class StandInDriver:
    """The driver of this process, libcuda.so.1, since it is loaded before anybody asks for one of that name."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.c.stand_in_count.argtypes = [c_char_p]
        self.c.stand_in_fail.argtypes = [c_char_p, c_int]
        self.c.stand_in_set_launch.argtypes = [LAUNCH]
        self.known: dict[str, tuple[BundledKernel, Launch]] = {}
        self.launched: list[Launched] = []
        self.only_records = False
        self._callback = LAUNCH(self._launch)  # kept: C holds no reference
        self._one_at_a_time = threading.Lock()  # the interpreter replaces parts of Triton's language while it runs

    def reset(self) -> None:
        self.c.stand_in_reset()
        self.launched.clear()
        self.only_records = False
        self.c.stand_in_set_launch(self._callback)

    def knows(self, kernels: Sequence[BundledKernel], launches: Sequence[Launch]) -> None:
        """Kernels of a bundle, and what its makers would have launched in the interpreter."""
        sources = {_identity(Variant.of(launch)): launch for launch in launches}
        for kernel in kernels:
            constants = tuple(pair for pair in kernel.constants if pair[0] not in OPERANDS)
            launch = sources[kernel.name, kernel.arguments, constants]
            self.known[hashlib.sha256(kernel.image).hexdigest()] = (kernel, launch)

    def count(self, what: str) -> int:
        return self.c.stand_in_count(what.encode())

    def _launch(
        self, image: int, name: bytes, device: int, grid: Any, threads: int, shared: int, stream: int, arguments: Any
    ) -> int:
        try:
            kernel, launch = self.known[hashlib.sha256(_elf(image)).hexdigest()]
            assert name.decode() == kernel.name
            given = [_value(arguments[place], kind) for place, (_, kind) in enumerate(kernel.arguments)]
            for place in range(len(given), len(given) + kernel.hidden_arguments):
                assert ctypes.cast(arguments[place], POINTER(c_void_p))[0] is None, "a hidden argument is not null"
            names = [argument for argument, _ in kernel.arguments]
            self.launched.append(
                Launched(
                    kernel.name,
                    device,
                    (grid[0], grid[1], grid[2]),
                    threads,
                    shared,
                    {
                        name: value.data_ptr() if isinstance(value, torch.Tensor) else value
                        for name, value in zip(names, given, strict=True)
                    },
                    dict(kernel.constants),
                )
            )
            if not self.only_records:
                with self._one_at_a_time:
                    launch.kernel[grid[0], grid[1], grid[2]](*given, **launch.constants)
            return 0
        except BaseException:
            traceback.print_exc()
            return 719  # CUDA_ERROR_LAUNCH_FAILED


def _identity(variant: Variant) -> tuple[Any, ...]:
    constants = tuple((name, str(value)) for name, value in variant.constants if name not in OPERANDS)
    return variant.name, variant.arguments, constants


def _elf(address: int) -> bytes:
    """An image, as long as its header says: to the end of the table of sections or of segments, which come last."""
    header = ctypes.string_at(address, 64)
    assert header.startswith(b"\x7fELF"), "no image of a cubin"

    def number(place: int, size: int) -> int:
        return int.from_bytes(header[place : place + size], "little")

    segments, sections = number(32, 8) + number(54, 2) * number(56, 2), number(40, 8) + number(58, 2) * number(60, 2)
    return ctypes.string_at(address, max(segments, sections))


def _value(place: int, kind: str) -> Any:
    """An argument as the interpreter takes it: a number, or a tensor that begins at its address."""
    if kind == "i32":
        return ctypes.c_int32.from_address(place).value
    if kind == "fp32":
        return ctypes.c_float.from_address(place).value
    address = ctypes.c_uint64.from_address(place).value
    memory = (ctypes.c_char * TYPES[kind].itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=TYPES[kind])
