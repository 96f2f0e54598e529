"""Triton's interpreter beside the NumPy that is installed; importing this mends it."""

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: type, *more: object) -> None:
    # Triton makes a loop's bound, an array of one number, an int in a way that NumPy 2.4 refuses.
    _patch_tensor(tensor, *more)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
