"""The KV cache of a TensorRT-LLM session as a pool that can be compacted: its memory, and its managers' blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.errors import ConfigError, StalePlan
from bpkv_trt.pool.block_memory import BlockMemory, BlockRows
from bpkv_trt.pool.block_table import BlockTable
from bpkv_trt.pool.kv_cache_manager import KVCacheManager
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.row_positions import RowPositions
from bpkv_trt.pool.rows import KeyValue
from bpkv_trt.pool.view import SequenceView

if TYPE_CHECKING:  # Triton is optional
    from bpkv_trt.kernels.paged import PagedCache
    from bpkv_trt.pool.block_caches import BlockCaches


@dataclass(frozen=True)
class _Part:
    """One of the session's pools: layers whose heads all hold equally many rows, in the same blocks."""

    memory: BlockMemory
    table: BlockTable
    layers: list[int]  # of the model, by layer in the pool
    caches: "BlockCaches | None"


class BlockPool:
    """Keys and values of a session's batch, in blocks that all KV heads of a pool's layers share.

    The engine writes rows and the managers hand blocks out; this pool is told what was written (`extend`), reads it,
    and packs what stays (`apply`). Heads of the layers of one pool keep equal counts, each rows of its own: one pool
    for all layers is the stock session's, one per layer lets layers differ. A sequence is named by the `seq_idx` of its
    GenerationSequence, which a session counts from 0 in every `decode`, with new managers: so every `decode` has a pool
    of its own.
    """

    def __init__(
        self,
        memories: Sequence[Tensor],
        layer_mapping: Tensor,
        managers: Sequence[KVCacheManager],
        *,
        dtype: torch.dtype | None = None,
        scales: Sequence[float] | None = None,
        poison: bool = False,
        kernels: bool | None = None,
    ) -> None:
        """All sequences that the managers have, before the engine has written a row of theirs.

        memories: by pool, [blocks, layers, 2, Hkv, tokens_per_block, D] as TensorRT-LLM's allocator makes it.
        layer_mapping: [L, 2] int, the pool of every layer and its place there (`host_kv_cache_pool_mapping`). managers:
        by pool, those of the `PoolsKVCacheManager`. dtype: what a stored number is, by default as the memory says; of
        torch.int8 it must be told, since FP8 is stored as such too. scales: by layer, what a number of a quantised
        cache is multiplied by. poison: unused rows are NaN. kernels: whether Triton kernels work on it; by default on
        a GPU. On a CPU they need Triton's interpreter.

        Raises ConfigError for what cannot be compacted, or kernels cannot read; TypeError or ValueError where the parts
        do not fit together.
        """
        layers = _layers_of(layer_mapping, [memory.shape[1] for memory in memories])
        if dtype is None and memories[0].dtype == torch.int8:
            raise TypeError("the pool is torch.int8, which INT8 and FP8 are stored as; say which by dtype.")
        shapes = {tuple(memory.shape[3:]) for memory in memories}
        if len(shapes) != 1:
            raise ConfigError(
                f"Layers differ in (KV heads, tokens per block, head size): {sorted(shapes)}. Compaction needs equal "
                "ones in every layer; run this engine without it."
            )
        self.kv_heads, self.page_size, self.head_dim = shapes.pop()
        self.layers, self.poison = layer_mapping.shape[0], poison
        self._place: list[tuple[int, int]] = [(pool, place) for pool, place in layer_mapping.tolist()]
        given = zip(memories, managers, layers, strict=True)
        self._parts = [_part(*each, dtype or memories[0].dtype, scales, kernels) for each in given]
        shape = [(part.memory.layers, self.kv_heads) for part in self._parts]
        admitted = self._parts[0].table.sequences
        self._positions = {sequence: RowPositions.empty(shape, self.device) for sequence in admitted}
        if poison:
            for part in self._parts:
                part.memory.poison(np.arange(part.memory.blocks))

    # Sequences

    def extend(self, sequence: int, count: int) -> None:
        """The engine has written `count` more rows in every layer and head, at the next logical positions.

        Told after every run of the engine, of every sequence that it ran.
        """
        positions = self._positions[sequence]
        for pool, part in enumerate(self._parts):
            assert positions.rows(pool) + count <= part.table.reserved(sequence), "more rows than there are blocks for"
        positions.extend(count)

    def trim(self, sequence: int) -> int:
        """Give back the blocks past those of the rows and the next token's; returns how many.

        Managers take every prompt to be as long as the batch's longest, and count on for a sequence that has ended.
        """
        positions = self._positions[sequence]
        return sum(part.table.truncate(sequence, positions.rows(pool)) for pool, part in enumerate(self._parts))

    def holds_another_step(self) -> bool:
        """Whether the managers' next step, which counts one more row of every sequence, finds the blocks for it."""
        return all(part.table.holds_another_step() for part in self._parts)

    def release(self, sequence: int) -> None:
        """Forget a sequence whose blocks the managers have freed."""
        assert sequence not in self._parts[0].table.sequences, "the managers still have this sequence"
        del self._positions[sequence]
        if self.poison:
            for part in self._parts:
                part.memory.poison(part.table.free)

    def apply(self, plan: CompactionPlan) -> int:
        """Keep only the planned rows, packed to the front of their heads; returns how many blocks this freed.

        It belongs after the managers' `step` and before the engine's next run: the managers then count the next token's
        row, which always keeps a place. Raises StalePlan if the plan does not fit the sequence as it is, ConfigError
        if heads that share blocks would keep different counts; nothing is moved then.
        """
        self._validate(plan)
        rows = [self._kept(plan, part) for part in self._parts]
        positions, freed = self._positions[plan.sequence], 0
        for pool, (part, kept) in enumerate(zip(self._parts, rows, strict=True)):
            blocks = part.table.blocks(plan.sequence)
            if part.caches is None:
                part.memory.pack(blocks, kept)
            else:
                part.caches.pack(part.table.key_pages(blocks), positions.rows(pool), kept)
            if self.poison:
                part.memory.poison(blocks, kept.shape[2])
            freed += part.table.truncate(plan.sequence, kept.shape[2])
        positions.keep(rows)
        return freed

    # Reading

    def heads(self, sequence: int, layer: int) -> BlockRows:
        """The rows of one layer; good until the sequence changes."""
        pool, place = self._place[layer]
        part, length = self._parts[pool], self._positions[sequence].rows(pool)
        return BlockRows(part.memory, place, part.table.blocks(sequence), length)

    def gather(self, sequence: int, layer: int, head: NDArray[np.int64], rows: NDArray[np.int64]) -> KeyValue:
        """(k, v) [n, D] of rows `rows` of heads `head`, copied."""
        pool, place = self._place[layer]
        part = self._parts[pool]
        return part.memory.gather(place, head, part.table.blocks(sequence), rows)

    def caches(self, sequences: Sequence[int]) -> list["PagedCache"]:
        """By layer, the rows of several sequences as kernels find them; good until one of these changes."""
        by_pool = []
        for pool, part in enumerate(self._parts):
            assert part.caches is not None, "no kernels work on this pool"
            pages = [part.table.key_pages(part.table.blocks(sequence)) for sequence in sequences]
            by_pool.append(part.caches.layers(pages, [self._positions[each].rows(pool) for each in sequences]))
        return [by_pool[pool][place] for pool, place in self._place]

    def view(self, sequence: int) -> SequenceView:
        """What a policy sees of a sequence now."""
        return SequenceView(sequence, self.lengths(sequence), self.logical_length(sequence), self)

    def lengths(self, sequence: int) -> NDArray[np.int32]:
        """[L, Hkv] int32 rows held, the same for all heads of a pool's layers."""
        rows = np.array([self._positions[sequence].rows(pool) for pool, _ in self._place], dtype=np.int32)
        return np.repeat(rows[:, None], self.kv_heads, axis=1)

    def logical_length(self, sequence: int) -> int:
        """Tokens the sequence has seen, evicted or not: the position of the next one."""
        return self._positions[sequence].logical_length

    def positions(self, sequence: int, layer: int, head: int) -> Tensor:
        """[n] int32 logical positions of a head's rows, ascending."""
        return self._positions[sequence].head(*self._place[layer], head)

    def block_offsets(self) -> Tensor:
        """[pools, B, 1, 2, max_blocks_per_seq] int32, on the CPU: what `get_block_offsets(1)` gives, without its loops.

        An entry is where a block's K (or V) begins in its pool, for the pool's first layer, in pages of one layer's K
        or V: 2 layers block + (0 or 1).
        """
        return torch.from_numpy(np.stack([part.table.offsets() for part in self._parts]))

    @property
    def most_rows(self) -> int:
        """Rows that a sequence's list of blocks can come to hold, in the widest of the pools' tables."""
        return max(part.table.manager.blocks_manager.max_blocks_per_seq for part in self._parts) * self.page_size

    @property
    def free_pages(self) -> int:
        """Blocks that no sequence owns, over all pools."""
        return sum(part.table.free.size for part in self._parts)

    @property
    def live_pages(self) -> int:
        """Blocks that sequences own, over all pools."""
        return sum(part.memory.blocks for part in self._parts) - self.free_pages

    @property
    def sequences(self) -> tuple[int, ...]:
        """Handles of the sequences held."""
        return tuple(self._positions)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._parts[0].memory.device

    @property
    def by_kernels(self) -> bool:
        """Whether Triton kernels work on it."""
        return self._parts[0].caches is not None

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the cache."""
        return self._parts[0].memory.dtype.itemsize

    def bytes_of(self, sequence: int) -> int:
        """Bytes of all blocks that a sequence owns, those reserved for rows to come among them, over all pools.

        A block of a pool has K and V of all its layers, so compaction gives bytes back for all of them or for none.
        One that the managers have freed owns none.
        """
        if sequence not in self._parts[0].table.sequences:
            return 0
        return sum(part.table.blocks(sequence).size * part.memory.block_bytes for part in self._parts)

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping, the managers' or this pool's, contradicts itself or the memory."""
        for pool, part in enumerate(self._parts):
            part.table.check_integrity()
            assert set(part.table.sequences) == set(self._positions), "the managers have other sequences"
            for sequence, positions in self._positions.items():
                rows = positions.rows(pool)
                assert rows <= part.table.reserved(sequence), "rows lie past the sequence's blocks"
                assert rows <= positions.logical_length, "there are more rows than tokens"
        for sequence, positions in self._positions.items():
            for layer, head in np.ndindex(self.layers, self.kv_heads):
                held = self.positions(sequence, layer, head)
                assert bool((held.diff() > 0).all()), "the positions of a head do not ascend"
                if held.numel():
                    assert held[0] >= 0 and held[-1] < positions.logical_length, "a position was never given out"
        if self.poison:
            self._check_poison()

    # Within

    def _validate(self, plan: CompactionPlan) -> None:
        if plan.sequence not in self._positions or plan.sequence not in self._parts[0].table.sequences:
            raise StalePlan(
                f"The compaction plan is for sequence {plan.sequence}, which this pool does not hold (any more). "
                "Nothing was moved. Score a sequence of the current batch."
            )
        plan.validate(self.lengths(plan.sequence), self.logical_length(plan.sequence))
        for pool, part in enumerate(self._parts):
            counts = plan.counts[part.layers]
            if (counts != counts.flat[0]).any():
                raise ConfigError(
                    f"The plan keeps {counts.min()} to {counts.max()} rows per head in layers that share the blocks of "
                    "a TensorRT-LLM pool, where all heads hold equally many. Nothing was moved. Let every head keep as "
                    "many (scope head, no layer table), or give every layer a pool of its own for counts by layer."
                )
            rows = self._positions[plan.sequence].rows(pool)
            assert rows < part.table.reserved(plan.sequence), "a compaction belongs after the managers' step"

    def _kept(self, plan: CompactionPlan, part: _Part) -> Tensor:
        """[layers, Hkv, n] int64 kept rows of a pool's layers."""
        rows = [[plan.kept(layer, head) for head in range(self.kv_heads)] for layer in part.layers]
        return torch.from_numpy(np.array(rows, dtype=np.int64)).to(self.device)

    def _check_poison(self) -> None:
        for pool, part in enumerate(self._parts):
            unused = torch.ones(part.memory.blocks, self.page_size, dtype=torch.bool, device=self.device)
            for sequence, positions in self._positions.items():
                rows = np.arange(positions.rows(pool))
                unused[part.table.blocks(sequence)[rows // self.page_size], rows % self.page_size] = False
            assert part.memory.is_poisoned(unused), "a row lies where no sequence holds one"


def _layers_of(mapping: Tensor, sizes: Sequence[int]) -> list[list[int]]:
    """By pool of so many layers, the model's layers in the pool's order."""
    wanted = {(pool, place) for pool, size in enumerate(sizes) for place in range(size)}
    given = {(pool, place): layer for layer, (pool, place) in enumerate(mapping.tolist())}
    if set(given) != wanted or len(given) != mapping.shape[0]:
        raise ValueError(f"layer_mapping is {mapping.tolist()}; expected every place in pools of {list(sizes)} layers.")
    return [[given[pool, place] for place in range(size)] for pool, size in enumerate(sizes)]


def _part(
    rows: Tensor,
    manager: KVCacheManager,
    layers: list[int],
    dtype: torch.dtype,
    scales: Sequence[float] | None,
    kernels: bool | None,
) -> _Part:
    blocks = manager.blocks_manager
    managed = blocks.num_blocks, blocks.num_layers, manager.tokens_per_block
    if managed != (rows.shape[0], rows.shape[1], rows.shape[4]):
        raise ValueError(f"a manager has (blocks, layers, tokens per block) {managed} of a pool {tuple(rows.shape)}.")
    memory = BlockMemory(rows, dtype, None if scales is None else [scales[layer] for layer in layers])
    by_kernels = rows.is_cuda if kernels is None else kernels
    return _Part(memory, BlockTable(manager), layers, _caches(memory) if by_kernels else None)


def _caches(memory: BlockMemory) -> "BlockCaches":
    from bpkv_trt.pool.block_caches import BlockCaches

    return BlockCaches(memory)
