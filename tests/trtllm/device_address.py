"""Addresses as an engine is given them; on a GPU they outlive their memory, and here that is noticed."""

import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Address(int):
    """Of a tensor's first element; 0 for a tensor without elements, as torch has it."""

    _memory: weakref.ref[torch.UntypedStorage]
    _element: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Address":
        made = cls(tensor.data_ptr())
        made._memory, made._element = weakref.ref(tensor.untyped_storage()), tensor.element_size()
        return made

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """What lies there now. Raises ValueError for memory that nobody holds any more, or too little of it."""
        memory = self._memory()
        if memory is None:
            raise ValueError("nobody holds its memory any more")
        if dtype.itemsize != self._element:
            raise ValueError(f"its elements have {self._element} bytes, and {dtype} has {dtype.itemsize}")
        first = self - memory.data_ptr()
        if first + prod(shape) * dtype.itemsize > memory.nbytes():
            raise ValueError(f"its memory ends before a shape of {tuple(shape)} does")
        return torch.empty(0, dtype=dtype).set_(memory, first // dtype.itemsize, tuple(shape))
