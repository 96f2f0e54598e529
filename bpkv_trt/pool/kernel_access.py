"""Whether kernels can work on a pool's rows, and the kernels; where that cannot be, asking says why."""

import torch

from bpkv_trt.errors import ConfigError
from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.configuration import LARGEST_HEAD
from bpkv_trt.kernels.language import INSTALLED, interprets
from bpkv_trt.kernels.launch import launches_by_triton
from bpkv_trt.kernels.paged import ROW_BYTES, CacheType, PagedCache

__all__ = ["CacheType", "PagedCache", "compact", "readable_type"]


def readable_type(dtype: torch.dtype, head_dim: int, device: torch.device) -> CacheType:
    """What kernels call rows of `head_dim` numbers; ConfigError where they cannot read such, or nothing runs them."""
    if launches_by_triton():
        _check_triton(device)
    try:
        cache_type = CacheType.of(dtype)
    except TypeError as error:
        raise ConfigError(f"The KV pool's {error} Choose one of these, or leave kernels out.") from None
    if head_dim > LARGEST_HEAD:
        raise ConfigError(
            f"The head size of this model's cache is {head_dim}; kernels are compiled for at most {LARGEST_HEAD}. "
            "Run on the CPU: --device cpu."
        )
    row_bytes = head_dim * dtype.itemsize
    if row_bytes % ROW_BYTES:
        raise ConfigError(
            f"A row of this model's cache is {row_bytes} bytes (head size {head_dim}, "
            f"{dtype}); kernels read rows of multiples of {ROW_BYTES}. Run on the CPU: --device cpu."
        )
    return cache_type


def _check_triton(device: torch.device) -> None:
    if not INSTALLED:
        raise ConfigError(
            "The KV pool is on a GPU, where its kernels need Triton, which is not installed. "
            "pip install 'bpkv-trt[kernels]', or run on the CPU with --device cpu."
        )
    if device.type != "cuda" and not interprets():
        raise ConfigError(
            f"The KV pool is on {device}, where kernels need Triton's interpreter. Set TRITON_INTERPRET=1 "
            "before Python starts, or leave kernels out."
        )
