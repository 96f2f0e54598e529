import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined; 0 runs these tests on a GPU

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
