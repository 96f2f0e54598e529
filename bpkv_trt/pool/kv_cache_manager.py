"""What is used of TensorRT-LLM's block bookkeeping, `tensorrt_llm.runtime.kv_cache_manager`.

Names and meaning are TensorRT-LLM's, the same from 0.16 to 1.2. The objects are given; nothing is imported.
"""

from collections.abc import Mapping
from typing import Protocol


class Block(Protocol):
    """A block of the pool's memory."""

    idx: int
    ref_count: int  # owners

    def remove_link(self) -> None:
        """One owner less."""


class GenerationSequence(Protocol):
    """A sequence, as a key: it is equal to itself only while its row in the batch is the same, so take the object."""

    def get_batch_idx(self) -> int:
        """Its row in the batch, which changes when another sequence ends."""

    def get_seq_idx(self) -> int:
        """Its number, which does not."""


class BlocksManager(Protocol):
    """Who owns the blocks of one pool."""

    num_layers: int  # in the pool
    num_blocks: int
    max_blocks_per_seq: int
    free_blocks: list[Block]  # the first is given out next
    allocated_blocks: Mapping[GenerationSequence, list[list[Block]]]  # by beam; asking for a key unknown to it adds it


class KVCacheManager(Protocol):
    """The sequences of one pool."""

    blocks_manager: BlocksManager
    tokens_per_block: int
    max_attention_window_size: int
    sink_token_len: int
    beam_width: int
    lens: list[int]  # by row in the batch: rows for which there are blocks; after `step` the next token's among them
    sequences: list[GenerationSequence]
