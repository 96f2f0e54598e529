"""Rows laid out as a paged cache in which whatever must not be read is poisoned."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.kernels.paged import CacheType, PagedCache

FIRST_PAGE = 2  # K of layer 1 in TensorRT-LLM's blocks [layers, K or V, ...]
NOWHERE = 10**8  # a page so far past the pool that touching it ends the process

Rows = list[list[Tensor]]  # [B][Hkv] of [n, D], of a cache's type


def random_rows(
    lengths: list[list[int]], dtype: torch.dtype, head_dim: int, *, common: float = 0.0, spread: float = 1.0
) -> Rows:
    """Normal rows of the given spread around one vector of length `common` in every element."""
    rows = [[common + spread * torch.randn(length, head_dim) for length in heads] for heads in lengths]
    return [
        [(each * 20).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else each.to(dtype) for each in heads]
        for heads in rows
    ]


@dataclass
class LaidOut:
    cache: PagedCache
    memory: tuple[Tensor, Tensor]  # K and V [pages, heads in a page, page_size, D]: what `addresses` name


def laid_out(
    keys: Rows, values: Rows, device: torch.device, *, page_size: int = 16, shared_pages: bool = False, **scales: float
) -> LaidOut:
    """Pages in random order. Free rows hold NaN (127 in int8); past a head's end the page numbers are NOWHERE."""
    sequences, heads, (_, head_dim), dtype = len(keys), len(keys[0]), keys[0][0].shape, keys[0][0].dtype
    lengths = torch.tensor([[len(rows) for rows in each] for each in keys], dtype=torch.int32)
    listed = lengths.amax(1, keepdim=True) if shared_pages else lengths  # [B, lists]
    width = -(-int(listed.max()) // page_size)
    pages = torch.randperm(listed.numel() * width).view(*listed.shape, width)
    if shared_pages:  # TensorRT-LLM's pool [blocks, 2 layers, K or V, Hkv, page_size, D]
        memory = (_poisoned((4 * pages.numel(), heads, page_size, head_dim), dtype),) * 2
        numbers = torch.stack([4 * pages + FIRST_PAGE, 4 * pages + FIRST_PAGE + 1], dim=1)  # [B, 2, lists, P]
    else:
        shape = (pages.numel() + FIRST_PAGE, 1, page_size, head_dim)
        memory = (_poisoned(shape, dtype), _poisoned(shape, dtype))
        numbers = torch.stack([pages + FIRST_PAGE, pages + FIRST_PAGE], dim=1)
    for sequence in range(sequences):
        for head in range(heads):
            for kind, rows in enumerate((keys[sequence][head], values[sequence][head])):
                row = torch.arange(len(rows))
                page = numbers[sequence, kind, 0 if shared_pages else head, row // page_size]
                memory[kind][page, head if shared_pages else 0, row % page_size] = rows
    past = torch.arange(width) * page_size >= listed.unsqueeze(-1)  # [B, lists, P]
    tables = (numbers - FIRST_PAGE).masked_fill(past.unsqueeze(1), NOWHERE).int().to(device)
    memory = (memory[0].to(device),) * 2 if shared_pages else (memory[0].to(device), memory[1].to(device))
    cache = PagedCache(
        torch.tensor([each.data_ptr() for each in memory], device=device),
        tables[:, 0],
        tables[:, 1],
        _strided(lengths.to(device), shared=shared_pages),
        CacheType.of(dtype),
        page_size,
        head_dim,
        FIRST_PAGE,
        shared_pages,
        **scales,
    )
    return LaidOut(cache, memory)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 127 if dtype == torch.int8 else torch.nan).to(dtype)


def _strided(lengths: Tensor, *, shared: bool) -> Tensor:
    """One length of all heads where they share it, as TensorRT-LLM keeps them, else with numbers between that lie."""
    if shared and bool((lengths == lengths[:, :1]).all()):
        return lengths[:, 0].contiguous().unsqueeze(1).expand(lengths.shape)
    gap = torch.full_like(lengths[:, :1], NOWHERE)
    return torch.cat([lengths, gap], dim=1)[:, :-1]
