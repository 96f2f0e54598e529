"""Cubins as one block of bytes, with what launching them takes: what an engine carries of the kernels.

Little endian. A text is its length, u32, and its bytes in UTF-8; a table its number of rows, u32, and two texts each.

    magic "BPKVKRNL", u32 version
    table of constants
    u32 kernels, then for each
        text target, text name, u32 threads, u32 shared bytes, u32 hidden arguments
        table of arguments (name and Triton's type, in order), table of constants (name and value)
        u64 bytes of the image, zeros up to a multiple of 16 from the beginning, the image

`plugins/src/kernel_bundle.cpp` and `unpack` read it. A file of one begins with its SHA-256 (`sealed`).
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bpkv_trt.kernels.lse import ROWS_PER_SPLIT
from bpkv_trt.kernels.variant import Identity

if TYPE_CHECKING:  # Triton is not needed to read
    from bpkv_trt.kernels.aot import Cubin

MAGIC = b"BPKVKRNL"
VERSION = 1
ALIGNMENT = 16  # bytes
DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class BundledKernel:
    """A kernel compiled for one target."""

    target: str
    name: str
    threads: int
    shared_bytes: int  # of dynamic shared memory
    hidden_arguments: int  # pointers that follow the others and are null
    arguments: tuple[tuple[str, str], ...]  # name and Triton's type
    constants: tuple[tuple[str, str], ...]
    image: bytes = field(repr=False)

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.arguments, frozenset(self.constants), self.threads)


def pack(cubins: Iterable["Cubin"], folder: Path) -> bytes:
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


def unpack(data: bytes) -> tuple[dict[str, str], list[BundledKernel]]:
    """The table of constants, and the kernels. Raises ValueError, with the reason, for what `pack` did not write."""
    reader = _Reader(data)
    if reader.bytes(len(MAGIC)) != MAGIC:
        raise ValueError("they are no bundle of kernels")
    if (version := reader.number()) != VERSION:
        raise ValueError(f"they are of version {version}, not {VERSION}")
    constants = dict(reader.table())
    kernels = [reader.kernel() for _ in range(reader.number())]
    if reader.place != len(data):
        raise ValueError("bytes follow the last kernel")
    return constants, kernels


def sealed(bundle: bytes) -> bytes:
    """As a file holds a bundle: damage is found when it is read again."""
    return hashlib.sha256(bundle).digest() + bundle


def unsealed(content: bytes) -> bytes:
    """The bundle in a file. Raises ValueError where a byte is another, or missing."""
    digest, bundle = content[:DIGEST], content[DIGEST:]
    if hashlib.sha256(bundle).digest() != digest:
        raise ValueError("bytes are missing or changed")
    return bundle


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


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def bytes(self, length: int) -> bytes:
        if length > len(self.data) - self.place:
            raise ValueError("bytes are missing at their end")
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self, form: str = "<I") -> int:
        (value,) = struct.unpack(form, self.bytes(struct.calcsize(form)))
        return int(value)

    def text(self) -> str:
        return self.bytes(self.number()).decode()  # UnicodeDecodeError is a ValueError

    def table(self) -> tuple[tuple[str, str], ...]:
        return tuple((self.text(), self.text()) for _ in range(self.number()))

    def kernel(self) -> BundledKernel:
        head = (self.text(), self.text(), self.number(), self.number(), self.number(), self.table(), self.table())
        length = self.number("<Q")
        self.bytes(-self.place % ALIGNMENT)
        return BundledKernel(*head, image=self.bytes(length))
