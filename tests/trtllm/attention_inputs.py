"""What the attention plugin takes for granted of a step's inputs, and would read or write elsewhere without."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.trtllm.paged_memory import PagedMemory


def check_attention_inputs(feed: Mapping[str, Tensor], memory: PagedMemory) -> None:
    """Raises ValueError, with the inputs' names."""
    layers = memory.pool.shape[1]
    generation, lengths = feed["host_request_types"].bool(), feed["sequence_length"]
    counts = torch.where(generation, 1, feed["context_lengths"])
    mapping = [[0, layer] for layer in range(layers)]
    packed, needed = {name: len(feed[name]) for name in ("input_ids", "position_ids")}, int(counts.sum())
    ended = feed["last_token_ids"]
    same = ("context_lengths", "kv_cache_block_offsets")
    faults = {
        "host_kv_cache_pool_mapping is not of one pool": feed["host_kv_cache_pool_mapping"].tolist() != mapping,
        "a step is of contexts or of single tokens": len(set(generation.tolist())) != 1,
        f"packed tokens are {packed}, and {needed} are needed": set(packed.values()) != {needed},
        "last_token_ids are not where the tokens of each sequence end": not torch.equal(ended, counts.cumsum(0).int()),
        "a sequence is shorter than what is added to it": bool((lengths < counts).any()),
        "host_past_key_value_lengths are less than what is cached": bool(
            generation.all() and feed["host_past_key_value_lengths"].max() < lengths.max() - 1
        ),
    } | {f"{name} differs on the host": not torch.equal(feed[name], feed[f"host_{name}"]) for name in same}
    found = [fault for fault, there in faults.items() if there]
    if found:
        raise ValueError("; ".join(found))
    _check_blocks(feed["kv_cache_block_offsets"], lengths, memory)


def _check_blocks(table: Tensor, lengths: Tensor, memory: PagedMemory) -> None:
    """table [1, B, 2, W]: K and V of the blocks that each sequence has, each of one sequence."""
    blocks, layers = memory.pool.shape[:2]
    owned: list[int] = []
    for sequence, length in enumerate(lengths.tolist()):
        needed = -(-length // memory.page_size)
        if needed > table.shape[3]:
            raise ValueError(f"sequence {sequence} has {length} rows, and a table of {table.shape[3]} blocks")
        k, v = table[0, sequence, :, :needed]
        if not torch.equal(v, k + 1) or bool((k % (2 * layers)).any()):
            raise ValueError(f"kv_cache_block_offsets of sequence {sequence} are no blocks: {k.tolist()}, {v.tolist()}")
        owned += (k // (2 * layers)).tolist()
    if len(set(owned)) < len(owned) or any(not 0 <= block < blocks for block in owned):
        raise ValueError(f"sequences do not have blocks of their own among {blocks}: {owned}")
