"""CUDA's driver, played by `plugins/tests/stand_in_cuda.cpp`: launches run in Triton's interpreter, on the same memory.

Which kernel a launch means is known by the cubin that was loaded, byte for byte.
"""

import ctypes
import hashlib
import threading
import traceback
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bpkv_trt.kernels.bundle import BundledKernel
from bpkv_trt.kernels.launch import Launch, run_by_triton
from bpkv_trt.kernels.variant import Variant

TYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*i64": torch.int64,
    "*i32": torch.int32,
    "*u8": torch.uint8,
}
LAUNCH = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_char_p, c_int, POINTER(c_uint), c_uint, c_uint, c_void_p, POINTER(c_void_p)
)


@dataclass(frozen=True)
class Launched:
    """What the driver was asked for."""

    kernel: str
    device: int
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    stream: int
    types: dict[str, str]  # by the kernel's names of its arguments, in order
    arguments: dict[str, Any]  # likewise: addresses and numbers
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
        sources = {Variant.of(launch).identity: launch for launch in launches}
        for kernel in kernels:
            self.known[hashlib.sha256(kernel.image).hexdigest()] = (kernel, sources[kernel.identity])

    def current_device(self) -> int:
        """That of the calling thread's context; -1: it is in none."""
        context = c_void_p()
        assert self.c.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return (context.value or 0) - 1

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
            by_name = dict(zip((name for name, _ in kernel.arguments), given, strict=True))
            self.launched.append(
                Launched(
                    kernel.name,
                    device,
                    (grid[0], grid[1], grid[2]),
                    threads,
                    shared,
                    stream or 0,
                    dict(kernel.arguments),
                    {
                        name: value.data_ptr() if isinstance(value, torch.Tensor) else value
                        for name, value in by_name.items()
                    },
                    dict(kernel.constants),
                )
            )
            if not self.only_records:
                names = launch.kernel.arg_names[: len(launch.arguments)]
                arguments_in_order = tuple(by_name.get(name) for name in names)  # None: absent from the cubin
                with self._one_at_a_time:
                    run_by_triton(replace(launch, grid=(grid[0], grid[1], grid[2]), arguments=arguments_in_order))
            return 0
        except BaseException:
            traceback.print_exc()
            return 719  # CUDA_ERROR_LAUNCH_FAILED


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
