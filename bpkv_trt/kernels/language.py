"""The language that kernels are written in. Where Triton is not installed they are named and no more, which is what
launching compiled ones takes.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from bpkv_trt.errors import ConfigError

__all__ = ["INSTALLED", "NamedKernel", "interprets", "tl", "triton"]


class NamedKernel:
    """A kernel that only its name, its module and its arguments are known of."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.__name__ = fn, fn.__name__
        self.arg_names = list(inspect.signature(fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> NoReturn:
        raise ConfigError(
            f"The kernel {self.__name__} cannot run: Triton is not installed. pip install 'bpkv-trt[kernels]', or "
            "launch the compiled kernels of an engine."
        )


class _Constant:
    """As `tl.constexpr`: a number in a module, or an annotation."""

    def __init__(self, value: float) -> None:
        self.value = value


try:
    import triton
    import triton.language as tl

    INSTALLED = True
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    INSTALLED = False
    triton = SimpleNamespace(jit=NamedKernel)
    tl = SimpleNamespace(constexpr=_Constant, float32="fp32", float16="fp16", bfloat16="bf16")  # as Triton prints them


def interprets() -> bool:
    """Whether kernels that Triton launches run in its interpreter, on the CPU."""
    return INSTALLED and bool(triton.knobs.runtime.interpret)
