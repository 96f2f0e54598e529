import os

import pytest
import torch

import tests.kernels.interpreter  # noqa: F401


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
