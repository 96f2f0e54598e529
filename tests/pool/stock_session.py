"""What TensorRT-LLM's session does around a BlockPool, in its order, with an engine that only writes rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bpkv_trt.pool import BlockPool
from tests.pool import stock_managers


class PoolSize(NamedTuple):
    num_kv_heads: int
    num_layers: int


class StockSession:
    """A batch of prompts; every row is given blocks for the longest of them, as the stock session does.

    Rows are written where the block table says that a plugin would find them, by the layout alone.
    """

    managers: Any = stock_managers  # of GenerationSequence and PoolsKVCacheManager

    def __init__(
        self,
        contexts: Sequence[int],
        new_tokens: int,
        mapping: Sequence[tuple[int, int]],
        *,
        kv_heads: int = 2,
        head_dim: int = 4,
        tokens_per_block: int = 4,
        spare: int = 3,
        storage: torch.dtype = torch.float32,
        pool_class: type[BlockPool] = BlockPool,
        **options: Any,
    ) -> None:
        """mapping: (pool, layer in pool) by layer; spare: blocks beyond what the batch can need."""
        self.contexts, self.longest, self.steps = list(contexts), max(contexts), 0
        self.mapping = torch.tensor(mapping, dtype=torch.int32)
        sizes = [PoolSize(kv_heads, int((self.mapping[:, 0] == pool).sum())) for pool in self.mapping[:, 0].unique()]
        window = self.longest + new_tokens
        wide = -(-window // tokens_per_block)
        blocks = len(contexts) * wide + spare
        self.pools = self.managers.PoolsKVCacheManager(
            sizes, wide, blocks, tokens_per_block, head_dim, window, beam_width=1, sink_token_len=0
        )
        for row in range(len(contexts)):
            self.pools.add_sequence(self.managers.GenerationSequence(seq_idx=row, batch_idx=row), self.longest)
        self.memories = [
            torch.empty(blocks, size.num_layers, 2, kv_heads, tokens_per_block, head_dim, dtype=storage)
            for size in sizes
        ]
        self.pool = pool_class(self.memories, self.mapping, self.pools._kv_cache_managers, **options)

    def table(self) -> Tensor:
        """[pools, B, 1, 2, W] as the engine is given it."""
        return self.pools.get_block_offsets(1)

    def write(self, table: Tensor, row: int, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Rows [Hkv, n, D] from row `first` of a layer on."""
        flat, pages, place = self._located(table, row, layer, first, k.shape[1])
        for page, rows in zip(pages, (k, v), strict=True):
            flat[page, :, place] = rows.transpose(0, 1)

    def read(self, table: Tensor, row: int, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """(k, v) [Hkv, count, D] as they lie in memory."""
        flat, pages, place = self._located(table, row, layer, 0, count)
        k, v = (flat[page, :, place].transpose(0, 1) for page in pages)
        return k, v

    def _located(self, table: Tensor, row: int, layer: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pages [pages, Hkv, tokens, D] of a layer's pool; those of K and V, [2, count], and the rows in them."""
        pool, layer_in_pool = self.mapping[layer].tolist()
        flat, rows = self.memories[pool].flatten(0, 2), torch.arange(first, first + count)
        pages = table[pool, row, 0, :, rows // flat.shape[2]].long() + 2 * layer_in_pool
        return flat, pages, rows % flat.shape[2]

    def step(self) -> None:
        """What comes between two runs of the engine: a place for the next token of every row."""
        self.steps += 1
        self.pools.step([False] * len(self.pools._kv_cache_managers[0].sequences))

    def lens(self, pool: int) -> list[int]:
        return self.pools._kv_cache_managers[pool].lens

    def blocks(self, sequence: int, pool: int = 0) -> list[int]:
        manager = self.pools._kv_cache_managers[pool]
        [owner] = [each for each in manager.sequences if each.seq_idx == sequence]
        return [block.idx for block in manager.blocks_manager.allocated_blocks[owner][0]]
