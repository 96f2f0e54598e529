import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined; 0 runs these tests on a GPU

import pytest
import torch
from triton.runtime import interpreter


def let_ranges_end_at_scalars() -> None:
    """Triton 3.5 holds a scalar as an array of one element, of which NumPy 2.4 makes no int."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor):
        patch(tensor)
        tensor.__index__ = lambda scalar: scalar.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_mend


let_ranges_end_at_scalars()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
