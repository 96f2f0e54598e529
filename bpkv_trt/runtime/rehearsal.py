"""A rehearsal: the model repeats passages of its prompt, so that what any answer might look up shows."""

import torch

from bpkv_trt.core.rehearsal import Rehearsal
from bpkv_trt.runtime.observers.repeated_attention import RepeatedAttention
from bpkv_trt.runtime.repetition import LEAD
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost

PASSAGE = 64  # tokens repeated at a time
ROWS = LEAD + PASSAGE  # that a sequence grows by meanwhile: by the lead the model finds the place, as in KVzip


def passages(context: range, count: int) -> list[range]:
    """Passages spread evenly over the positions `context`, some `count` in all, or the whole where it has no more."""
    if count >= len(context):
        return [context[start : start + PASSAGE] for start in range(0, len(context), PASSAGE)]
    size = min(count, PASSAGE)
    share = len(context) / (count // size)
    starts = [int((i + 0.5) * share) - size // 2 for i in range(count // size)]
    return [context[start : start + size] for start in starts]


def rehearse(host: TorchHost, sequence: int, count: int, sinks: int) -> Rehearsal | None:
    """Let the model repeat some `count` tokens of a sequence of which nothing was evicted, leaving out the sinks.

    A passage follows the sequence as if it came next, with no instruction: that a text is repeated is plain from its
    first words. It is taken back before the next one comes. None where there is nothing but sinks. Raises
    PoolExhausted where the pool has no room for a passage; the sequence is as it was.
    """
    tokens = host.tokens[sequence]
    parts = passages(range(min(sinks, len(tokens)), len(tokens)), count) if count else []
    if not parts:
        return None
    host.pool.require_growth(sequence, ROWS)
    positions = torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(host.device)
    attention = torch.cat([_received(host, sequence, part) for part in parts], dim=-1)
    return Rehearsal(positions, attention)


def _received(host: TorchHost, sequence: int, part: range) -> torch.Tensor:
    """[L, Hkv, len(part)] fp32: the most that each of its entries gets while the passage is repeated."""
    traits, length = host.traits, len(host.tokens[sequence])
    observer = RepeatedAttention(host.pool, traits, sequence, range(length), sinks=0)
    received = torch.zeros(traits.layers, traits.kv_heads, len(part), device=host.device)
    passage = host.tokens[sequence][max(0, part.start - LEAD) : part.stop]
    try:
        host.forward([Chunk(sequence, passage, [observer])], drafting=True)
    finally:
        host.retract(sequence, len(host.tokens[sequence]) - length)
    for (layer, head), largest in observer.largest.items():
        received[layer, head] = largest[part.start : part.stop]
    return received
