"""TensorRT-LLM's memory pools of a session, and its managers of their blocks, for models of one kind of layer."""

import weakref
from typing import Any

import torch
from torch import Tensor

from tests.pool import stock_managers
from tests.trtllm.contract.fakes import Implementation, implementations_of

PACKAGE = "tensorrt_llm.runtime.memory_pools"


class PoolMemories:
    """The pools that are held now, by address. What nobody wrote in one is NaN."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pool = torch.full(shape, torch.nan, dtype=dtype)
        self._held.add(pool)
        return pool

    def at(self, address: int) -> Tensor:
        """Raises ValueError where no pool begins."""
        for pool in self._held:
            if pool.data_ptr() == address:
                return pool
        raise ValueError(f"host_kv_cache_pool_pointers: no pool begins at {address}")

    def implementations(self) -> dict[str, Implementation]:
        return implementations_of(
            f"{PACKAGE}.memory_pools_allocator.MemoryPoolsAllocator", self._allocator_class()
        ) | implementations_of(
            f"{PACKAGE}.pools_kv_cache_manager.PoolsKVCacheManager", stock_managers.PoolsKVCacheManager
        )

    def _allocator_class(self) -> type:
        memories = self

        class MemoryPoolsAllocator:
            def __init__(self: Any, num_blocks: int, tokens_per_block: int, head_size: int) -> None:
                self._sizes = (num_blocks, tokens_per_block, head_size)
                self._pool_pointers: list[Tensor] = []

            def allocate(self: Any, dtype: Any, num_kv_heads_per_layer: list[int], device: str = "cuda") -> None:
                from tensorrt_llm.runtime.memory_pools.pool import Pool

                [heads] = set(num_kv_heads_per_layer)
                layers, (blocks, tokens, width) = len(num_kv_heads_per_layer), self._sizes
                self._pool_pointers.append(memories.allocate((blocks, layers, 2, heads, tokens, width), dtype))
                self._metadata = [Pool(num_kv_heads=heads, num_layers=layers)]
                self._mapping = torch.tensor([[0, layer] for layer in range(layers)], dtype=torch.int32)

            def get_kv_cache_pool_pointers(self: Any) -> Tensor:
                """[pools, 2]: on the device, and on the host, where there is none."""
                return torch.tensor([[pool.data_ptr(), 0] for pool in self._pool_pointers])

            def prepare_num_kv_heads_per_layer(cls: Any, kv_head: int, num_layers: int) -> list[int]:  # noqa: N805
                return [kv_head] * num_layers

            pools_metadata = property(lambda self: self._metadata)
            pool_mapping = property(lambda self: self._mapping)

        return MemoryPoolsAllocator
