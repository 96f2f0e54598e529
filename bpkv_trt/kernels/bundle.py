"""Cubins as one block of bytes, with what launching them takes: what an engine carries of the kernels.

Little endian. A text is its length, u32, and its bytes in UTF-8; a table its number of rows, u32, and two texts each.

    magic "BPKVKRNL", u32 version
    table of constants
    u32 kernels, then for each
        text target, text name, u32 threads, u32 shared bytes, u32 hidden arguments
        table of arguments (name and Triton's type, in order), table of constants (name and value)
        u64 bytes of the image, zeros up to a multiple of 16 from the beginning, the image

`plugins/src/kernel_bundle.cpp` reads it.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

from bpkv_trt.kernels.aot import Cubin
from bpkv_trt.kernels.lse import ROWS_PER_SPLIT

MAGIC = b"BPKVKRNL"
VERSION = 1
ALIGNMENT = 16  # bytes


def pack(cubins: Iterable[Cubin], folder: Path) -> bytes:
    """The cubins of a folder, whose files `compile_all` wrote, with all that the launchers know of them and a host's
    launcher must too."""
    cubins = list(cubins)
    packed = bytearray(MAGIC + _number(VERSION))
    packed += _table({"rows_per_split": ROWS_PER_SPLIT}.items())
    packed += _number(len(cubins))
    for cubin in cubins:
        packed += _text(cubin.target) + _text(cubin.name)
        packed += _number(cubin.threads) + _number(cubin.shared_bytes) + _number(cubin.hidden_arguments)
        packed += _table(cubin.arguments) + _table(cubin.constants.items())
        image = (folder / cubin.file).read_bytes()
        packed += struct.pack("<Q", len(image))
        packed += bytes(-len(packed) % ALIGNMENT)
        packed += image
    return bytes(packed)


def checksum(data: bytes) -> int:
    """FNV-1a of 64 bits, as a signed number: it names a bundle and finds damage, and keeps out nobody."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value - (value >> 63 << 64)


def _number(value: int) -> bytes:
    return struct.pack("<I", value)


def _text(value: object) -> bytes:
    data = str(value).encode()
    return _number(len(data)) + data


def _table(rows: Iterable[tuple[str, object]]) -> bytes:
    rows = list(rows)
    return _number(len(rows)) + b"".join(_text(name) + _text(value) for name, value in rows)
