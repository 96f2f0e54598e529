"""A stand-in for TensorRT-LLM's managers of KV blocks: its names and arguments, for one beam and no sink tokens."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class Block:
    def __init__(self, block_idx: int) -> None:
        self.idx, self.ref_count = block_idx, 0

    def add_link(self) -> None:
        self.ref_count += 1

    def remove_link(self) -> None:
        self.ref_count -= 1

    def has_link(self) -> bool:
        return self.ref_count > 0

    def is_shared(self) -> bool:
        return self.ref_count > 1


class GenerationSequence:
    """Hashed by its number and equal by number and row, so it is another key once its row has changed."""

    def __init__(self, seq_idx: int, batch_idx: int) -> None:
        self.seq_idx, self.batch_idx = seq_idx, batch_idx

    def get_batch_idx(self) -> int:
        return self.batch_idx

    def get_seq_idx(self) -> int:
        return self.seq_idx

    def __eq__(self, other: object) -> bool:
        mine = (self.seq_idx, self.batch_idx)
        return isinstance(other, GenerationSequence) and mine == (other.seq_idx, other.batch_idx)

    def __hash__(self) -> int:
        return self.seq_idx


class BlocksManager:
    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, max_blocks_per_seq: int = 128, beam_width: int = 1
    ) -> None:
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.max_blocks_per_seq, self.beam_width = max_blocks_per_seq, beam_width
        self.free_blocks = [Block(index) for index in range(num_blocks)]
        self.allocated_blocks: dict[GenerationSequence, list[list[Block]]] = defaultdict(lambda: [[]])

    def has_free_block(self) -> bool:
        return bool(self.free_blocks)

    def allocate(self, owner: GenerationSequence, share_across_beam: bool = False) -> None:
        if not self.has_free_block():
            raise RuntimeError("Can't allocate new block for KV cache")
        block = self.free_blocks.pop(0)
        block.add_link()
        self.allocated_blocks[owner][0].append(block)

    def free(self, owner: GenerationSequence) -> None:
        for block in self.allocated_blocks.pop(owner)[0]:
            block.remove_link()
            self.free_blocks.append(block)

    def get_number_blocks(self, owner: GenerationSequence) -> int:
        return len(self.allocated_blocks[owner][0])

    def get_k_or_v_block_offset(self, block_idx: int, field_idx: int) -> int:
        return block_idx * self.num_layers * 2 + field_idx

    def get_offset_array(self, beam_width: int) -> Tensor:
        table = torch.zeros(len(self.allocated_blocks), beam_width, 2, self.max_blocks_per_seq, dtype=torch.int32)
        for owner, (blocks,) in self.allocated_blocks.items():
            for place, block in enumerate(blocks):
                for field in (0, 1):
                    table[owner.get_batch_idx(), 0, field, place] = self.get_k_or_v_block_offset(block.idx, field)
        return table


class KVCacheManager:
    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        tokens_per_block: int,
        max_blocks_per_seq: int,
        max_attention_window_size: int,
        sink_token_len: int,
        beam_width: int = 1,
        use_one_more_block: bool = False,
    ) -> None:
        self.blocks_manager = BlocksManager(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks_per_seq=max_blocks_per_seq,
            beam_width=beam_width,
        )
        self.tokens_per_block, self.beam_width = tokens_per_block, beam_width
        self.max_attention_window_size = self.max_token_num = max_attention_window_size
        self.sink_token_len, self.bubble_len = sink_token_len, 0
        self.lens: list[int] = []
        self.sequences: list[GenerationSequence] = []

    def add_sequence(
        self, sequence: GenerationSequence, context_len: int, always_share_across_beam: bool = False
    ) -> None:
        self.lens.append(context_len)
        self.sequences.append(sequence)
        for _ in range(-(-min(context_len, self.max_token_num) // self.tokens_per_block)):
            self.blocks_manager.allocate(sequence)

    def step(self, finished: list[bool]) -> None:
        """A block for the next token where the last one is full; who ends gives all back, and the others move up."""
        for sequence in self.sequences:
            row = sequence.get_batch_idx()
            full = self.lens[row] % self.max_token_num % self.tokens_per_block == 0
            if full and not finished[row] and self.lens[row] < self.max_token_num:
                self.blocks_manager.allocate(sequence)
            self.lens[row] += 1
        going_on = [row for row, done in enumerate(finished) if not done]
        for row, done in enumerate(finished):
            if done:
                self.blocks_manager.free(self.sequences[row])
        self.lens = [self.lens[row] for row in going_on]
        self.sequences = [self.sequences[row] for row in going_on]
        for row, sequence in enumerate(self.sequences):
            sequence.batch_idx = row

    def get_block_offsets(self, beam_width: int) -> Tensor:
        return self.blocks_manager.get_offset_array(beam_width)


class PoolsKVCacheManager:
    def __init__(
        self,
        pools_metadata: list[Any],
        max_blocks_per_seq: int,
        num_blocks: int,
        tokens_per_block: int,
        head_size: int,
        max_attention_window_size: int,
        beam_width: int,
        sink_token_len: int,
    ) -> None:
        self._kv_cache_managers = [
            KVCacheManager(
                num_layers=pool.num_layers,
                num_blocks=num_blocks,
                block_size=pool.num_kv_heads * tokens_per_block * head_size,
                tokens_per_block=tokens_per_block,
                max_blocks_per_seq=max_blocks_per_seq,
                max_attention_window_size=max_attention_window_size,
                sink_token_len=sink_token_len,
                beam_width=beam_width,
            )
            for pool in pools_metadata
        ]

    def add_sequence(
        self, sequence: GenerationSequence, context_len: int, always_share_across_beam: bool = False
    ) -> None:
        for manager in self._kv_cache_managers:
            manager.add_sequence(sequence, context_len, always_share_across_beam)

    def step(self, finished: list[bool]) -> None:
        for manager in self._kv_cache_managers:
            manager.step(finished)

    def get_block_offsets(self, beam_width: int) -> Tensor:
        return torch.stack([manager.get_block_offsets(beam_width) for manager in self._kv_cache_managers])

    def has_single_pool(self) -> bool:
        return len(self._kv_cache_managers) == 1

    def get_single_kv_cache_manager(self) -> KVCacheManager:
        assert self.has_single_pool()
        return self._kv_cache_managers[0]
