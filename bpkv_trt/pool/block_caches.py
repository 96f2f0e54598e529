"""Blocks of one TensorRT-LLM pool where kernels find them."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.pool.block_memory import BlockMemory
from bpkv_trt.pool.kernel_access import PagedCache, compact, readable_type


class BlockCaches:
    """A pool's memory for kernels, which count it in pages: K or V of one layer of one block."""

    def __init__(self, memory: BlockMemory) -> None:
        """Raises ConfigError for rows that kernels cannot read, and where there is nothing to run them."""
        self.memory = memory
        self.type = readable_type(memory.dtype, memory.head_dim, memory.device)
        start = memory.rows.data_ptr()
        self.addresses = torch.tensor([start, start], dtype=torch.int64, device=memory.device)

    def layers(self, key_pages: Sequence[NDArray[np.int32]], lengths: Sequence[int]) -> list[PagedCache]:
        """By layer of the pool, sequences of so many rows, each with the list of its first layer's key pages."""
        table = np.zeros((len(key_pages), 1, max(map(len, key_pages))), dtype=np.int32)
        for row, pages in zip(table, key_pages, strict=True):
            row[0, : pages.size] = pages
        listed = torch.from_numpy(table).to(self.memory.device)
        counts = torch.tensor(lengths, dtype=torch.int32, device=self.memory.device)
        held = counts[:, None].expand(-1, self.memory.kv_heads)
        return [self._cache(listed, held, layer) for layer in range(self.memory.layers)]

    def pack(self, key_pages: NDArray[np.int32], length: int, rows: Tensor) -> None:
        """As `BlockMemory.pack`, all layers in one launch."""
        layers, heads, kept = rows.shape
        device = self.memory.device
        places = 2 * torch.arange(layers, dtype=torch.int32, device=device)
        pages = torch.from_numpy(key_pages).to(device) + places[:, None, None]
        held = torch.full((layers, heads), length, dtype=torch.int32, device=device)
        offsets = kept * torch.arange(layers * heads + 1, device=device)
        compact(rows.flatten().int(), offsets, self._cache(pages, held, 0), None)

    def _cache(self, pages: Tensor, lengths: Tensor, layer: int) -> PagedCache:
        memory = self.memory
        scale = 1.0 if memory.scales is None else memory.scales[layer]
        return PagedCache(
            self.addresses,
            pages,
            pages + 1,
            lengths,
            self.type,
            memory.tokens_per_block,
            memory.head_dim,
            first_page=2 * layer,
            shared_pages=True,
            key_scale=scale,
            value_scale=scale,
        )
