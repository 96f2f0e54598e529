"""Which blocks of one TensorRT-LLM pool hold a sequence, as its manager has it; and giving back those it outgrew."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from bpkv_trt.errors import ConfigError
from bpkv_trt.pool.kv_cache_manager import Block, GenerationSequence, KVCacheManager
from bpkv_trt.pool.storage import pages_of

Blocks = NDArray[np.int32]


class BlockTable:
    """A manager's lists. Nothing is kept beside them: whatever the manager does by itself is seen at once.

    A sequence is named by its `seq_idx`.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        """Raises ConfigError where a row of a sequence would not lie in block row // tokens_per_block of its list."""
        self.manager = manager
        if manager.beam_width != 1:
            raise self._refusal(f"beam search (beam width {manager.beam_width}) shares blocks between beams", "1 beam")
        if manager.sink_token_len:
            raise self._refusal(f"streaming with {manager.sink_token_len} sink tokens leaves gaps", "no sink tokens")
        if max(manager.lens, default=0) > manager.max_attention_window_size:
            raise self._refusal(
                f"a window of {manager.max_attention_window_size} tokens, shorter than the sequence, is written in "
                "circles",
                "a window as long as the longest sequence",
            )

    @staticmethod
    def _refusal(reason: str, remedy: str) -> ConfigError:
        return ConfigError(f"This KV cache cannot be compacted: {reason}. Set the session up with {remedy}.")

    @property
    def sequences(self) -> tuple[int, ...]:
        """Those that the manager has, by row in the batch."""
        return tuple(owner.get_seq_idx() for owner in self.manager.sequences)

    def blocks(self, sequence: int) -> Blocks:
        """[n] the sequence's blocks in order. Raises KeyError for one that the manager does not have."""
        return _numbers(self._list(sequence))

    @property
    def free(self) -> Blocks:
        """[n] blocks that nobody owns."""
        return _numbers(self.manager.blocks_manager.free_blocks)

    def reserved(self, sequence: int) -> int:
        """Rows that have a place in the sequence's blocks: after the manager's step, the next token's among them."""
        return min(self._length(sequence), len(self._list(sequence)) * self.manager.tokens_per_block)

    def holds_another_step(self) -> bool:
        """Whether the manager's next step finds as many free blocks as it takes, and a table that holds them."""
        rows, owned = self.manager.tokens_per_block, self.manager.blocks_manager
        full = sum(length % rows == 0 for length in self.manager.lens)
        fits = all(pages_of(length + 1, rows) <= owned.max_blocks_per_seq for length in self.manager.lens)
        return fits and full <= len(owned.free_blocks)

    def truncate(self, sequence: int, rows: int) -> int:
        """Give back every block past those of `rows` rows and the next token's; returns how many.

        As the manager's step leaves it: the row of the token to come is counted.
        """
        blocks, batch = self._list(sequence), self._owner(sequence).get_batch_idx()
        needed = pages_of(rows + 1, self.manager.tokens_per_block)
        assert len(blocks) >= needed, "the blocks do not hold the next token"
        tail = blocks[needed:]
        del blocks[needed:]
        for block in tail:
            block.remove_link()
            self.manager.blocks_manager.free_blocks.append(block)
        self.manager.lens[batch] = rows + 1
        return len(tail)

    def offsets(self) -> Blocks:
        """[B, 1, 2, max_blocks_per_seq], what `get_block_offsets(1)` gives: K and V of the pool's first layer.

        Block b begins at page 2 layers b of the pool's memory; past a sequence's end there are zeros.
        """
        owned = self.manager.blocks_manager
        table = np.zeros((len(self.sequences), 1, 2, owned.max_blocks_per_seq), dtype=np.int32)
        for owner in self.manager.sequences:
            blocks = self.blocks(owner.get_seq_idx())
            table[owner.get_batch_idx(), 0, :, : blocks.size] = self.key_pages(blocks) + np.array([[0], [1]])
        return table

    def key_pages(self, blocks: Blocks) -> Blocks:
        """Where the blocks' keys of the pool's first layer begin, in pages; their values follow."""
        pages: Blocks = blocks * np.int32(2 * self.manager.blocks_manager.num_layers)
        return pages

    def check_integrity(self) -> None:
        """Raise AssertionError where free and owned blocks and lengths contradict one another."""
        owned, rows = self.manager.blocks_manager, self.manager.tokens_per_block
        assert set(owned.allocated_blocks) == set(self.manager.sequences), "blocks are owned by no sequence"
        lists = [beams[0] for beams in owned.allocated_blocks.values()]
        live, free = [block for blocks in lists for block in blocks], owned.free_blocks
        found = Counter(block.idx for block in [*live, *free])
        assert max(found.values(), default=1) == 1, "a block is owned twice, or owned and free"
        assert set(found) == set(range(owned.num_blocks)), "a block is neither free nor owned"
        assert all(block.ref_count == 1 for block in live), "an owned block is not linked once"
        assert not any(block.ref_count for block in free), "a free block is linked"
        assert len(self.manager.lens) == len(self.manager.sequences), "a sequence has no length"
        for sequence in self.sequences:
            held = len(self._list(sequence))
            assert held == pages_of(self._length(sequence), rows), "the blocks are not those that the length fills"

    def _owner(self, sequence: int) -> GenerationSequence:
        for owner in self.manager.sequences:
            if owner.get_seq_idx() == sequence:
                return owner
        raise KeyError(sequence)

    def _length(self, sequence: int) -> int:
        return self.manager.lens[self._owner(sequence).get_batch_idx()]

    def _list(self, sequence: int) -> list[Block]:
        return self.manager.blocks_manager.allocated_blocks[self._owner(sequence)][0]


def _numbers(blocks: list[Block]) -> Blocks:
    return np.array([block.idx for block in blocks], dtype=np.int32)
