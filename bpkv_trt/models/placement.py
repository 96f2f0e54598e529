"""Where a model runs and in which type, where the user leaves it open."""

import torch

from bpkv_trt.errors import InputError


def device_of(option: str) -> str:
    """The device for `auto`, `cpu` or `cuda`: a GPU where there is one. InputError where the one asked for is not."""
    cuda = torch.cuda.is_available()
    if option == "cuda" and not cuda:
        raise InputError("--device cuda was given, but torch sees no CUDA GPU here; use --device cpu.")
    return option if option != "auto" else ("cuda" if cuda else "cpu")


def dtype_of(option: str, device: str) -> str:
    """The type for `auto` or a name: bfloat16 on a GPU, float32 on a CPU."""
    return option if option != "auto" else ("bfloat16" if device == "cuda" else "float32")
