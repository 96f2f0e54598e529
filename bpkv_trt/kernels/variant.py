"""What tells one compiled kernel from another: read off a launch, when it is compiled and when it is launched."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bpkv_trt.kernels.launch import Launch

ALIGNMENT = 16  # bytes, of every tensor; without it rows are loaded element by element
UNALIGNED = ("key_pages", "value_pages")  # parts of tables, which begin anywhere in them
WARP = 32  # threads
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class Identity(NamedTuple):
    """A variant as a bundle knows it, whose constants are texts. Equal for whatever `Variant` is equal."""

    name: str  # of the kernel
    arguments: tuple[tuple[str, str], ...]
    constants: frozenset[tuple[str, str]]
    threads: int


@dataclass(frozen=True)
class Variant:
    """One kernel, the types of its arguments and its constants: what a cubin is made from, for any target.

    Launches that differ in grid, sizes or numbers alone are one variant.
    """

    kernel: str  # module:function, so that another process finds it
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int

    @classmethod
    def of(cls, launch: Launch) -> "Variant":
        names = launch.kernel.arg_names[: len(launch.arguments)]
        given = list(zip(names, map(_type_of, launch.arguments), strict=True))
        absent = [(name, None) for name, kind in given if kind is None]
        return cls(
            kernel=f"{launch.kernel.fn.__module__}:{launch.kernel.fn.__name__}",
            arguments=tuple((name, kind) for name, kind in given if kind is not None),
            constants=(*absent, *launch.constants.items()),
            warps=launch.warps,
            stages=launch.stages,
        )

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def identity(self) -> Identity:
        constants = frozenset((name, str(value)) for name, value in self.constants)
        return Identity(self.name, self.arguments, constants, self.threads)

    @property
    def aligned(self) -> list[str]:
        """Tensors that are compiled to begin at a multiple of `ALIGNMENT`."""
        return [name for name, kind in self.arguments if is_aligned(name, kind)]


def is_aligned(name: str, kind: str) -> bool:
    """Whether an argument of this name and Triton's type is a tensor that has to be aligned."""
    return kind.startswith("*") and name not in UNALIGNED


def _type_of(argument: object) -> str | None:
    """Triton's name of an argument's type; None where it is absent, which is a constant."""
    match argument:
        case None:
            return None
        case torch.Tensor():
            return "*" + _TYPES[argument.dtype]
        case int():
            return "i32"
        case float():
            return "fp32"
    raise TypeError(f"An argument of a kernel is {type(argument)}; expected a tensor, a number or None.")
