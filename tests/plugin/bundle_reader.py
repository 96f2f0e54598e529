"""A bundle of kernels, read back by the words of `bpkv_trt/kernels/bundle.py`."""

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class BundledKernel:
    target: str
    name: str
    threads: int
    shared_bytes: int
    hidden_arguments: int
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...]
    image: bytes


def read_bundle(data: bytes) -> tuple[dict[str, str], list[BundledKernel]]:
    """Constants and kernels."""
    place = 12
    assert data[:8] == b"BPKVKRNL" and struct.unpack_from("<I", data, 8) == (1,)

    def number(form: str = "<I") -> int:
        nonlocal place
        (value,) = struct.unpack_from(form, data, place)
        place += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal place
        length = number()
        place += length
        return data[place - length : place].decode()

    def table() -> tuple[tuple[str, str], ...]:
        return tuple((text(), text()) for _ in range(number()))

    def kernel() -> BundledKernel:
        nonlocal place
        head = (text(), text(), number(), number(), number(), table(), table())
        length = number("<Q")
        place += -place % 16
        place += length
        return BundledKernel(*head, image=data[place - length : place])

    constants = dict(table())
    kernels = [kernel() for _ in range(number())]
    assert place == len(data)
    return constants, kernels
