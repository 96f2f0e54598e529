"""What launchers expect of tensors: checked before any launch, since a kernel would read wrong memory in silence."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def expect(
    name: str, given: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise TypeError for another type, ValueError for another shape (None: any size), device, or for gaps in memory.

    Nothing is copied to make it fit: contiguity is the caller's to provide.
    """
    if given.dtype not in dtypes:
        raise TypeError(f"{name} is {given.dtype}; expected {' or '.join(str(dtype) for dtype in dtypes)}.")
    fits = given.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(given.shape, shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if wanted is None else str(wanted) for wanted in shape)
        raise ValueError(f"{name} has shape {tuple(given.shape)}; expected ({sizes}).")
    if given.device != device:
        raise ValueError(f"{name} is on {given.device}; expected {device}, where the others are.")
    if not given.is_contiguous():
        raise ValueError(f"{name} has strides {given.stride()}; expected contiguous memory.")
