"""What launchers expect: checked before any launch, since a kernel would read wrong memory in silence.

Of tensors that is what the host knows: their shape, type, device and strides. What lies in them is the caller's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bpkv_trt.kernels.variant import ALIGNMENT

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def expect(
    name: str,
    given: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
    *,
    contiguous: bool = True,
) -> None:
    """Raise TypeError for another type, ValueError for another shape (None: any size), device, or for gaps in memory.

    Without a device any will do. Nothing is copied to make it fit: contiguity is the caller's to provide.
    """
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is a {type(given).__name__}; expected a tensor.")
    if given.dtype not in dtypes:
        raise TypeError(f"{name} is {given.dtype}; expected {' or '.join(str(dtype) for dtype in dtypes)}.")
    fits = given.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(given.shape, shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if wanted is None else str(wanted) for wanted in shape)
        raise ValueError(f"{name} has shape {tuple(given.shape)}; expected ({sizes}).")
    if device is not None and given.device != device:
        raise ValueError(f"{name} is on {given.device}; expected {device}, where the others are.")
    if contiguous and not given.is_contiguous():
        raise ValueError(f"{name} has strides {given.stride()}; expected contiguous memory.")


def aligned(given: Tensor) -> Tensor:
    """What compiled kernels can read, which begins at a multiple of `ALIGNMENT` bytes: a part of a table is copied."""
    return given.clone() if given.data_ptr() % ALIGNMENT else given


def expect_int(name: str, given: object, least: int, most: int | None = None) -> None:
    """Raise TypeError for what is no int, ValueError for one out of bounds."""
    if not isinstance(given, int):
        raise TypeError(f"{name} is a {type(given).__name__}; expected an int.")
    if given < least or (most is not None and given > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {given}; expected {bounds}.")


def expect_finite(name: str, given: object) -> None:
    """Raise TypeError for what is no number, ValueError for NaN or one that is infinite in fp32, as kernels have it."""
    if not isinstance(given, int | float):
        raise TypeError(f"{name} is a {type(given).__name__}; expected a number.")
    if not abs(given) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} is {given}; expected a finite number.")
