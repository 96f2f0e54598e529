"""KVzip's replay: a copy of a sequence is told to repeat its context, and fed the context as its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.errors import PoolExhausted
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.runtime.observers.repeated_attention import RepeatedAttention
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost

PART = 2048  # tokens repeated at a time
LEAD = 8  # of the part before, by which the model is told where to begin
FROM_THE_START = "Repeat the previous context exactly."
FROM_A_PART = "Repeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class Repetition:
    """A part of the context, and what is run after the context to have it repeated."""

    part: range  # logical positions
    tokens: Sequence[int]  # the instruction, what begins an answer, and the part


def repetitions(encoder: PromptEncoder, context: Sequence[int]) -> list[Repetition]:
    """Instructions, parts and their order as in KVzip, by the model's own tokenizer and chat template."""
    answer, result = encoder.encode_answer_start(), []
    for start in range(0, len(context), PART):
        part = range(start, min(start + PART, len(context)))
        lead = [*context[max(0, start - LEAD) : start]]
        instruction = encoder.encode_further(FROM_A_PART if start else FROM_THE_START)
        result.append(Repetition(part, [*instruction, *lead, *answer, *context[part.start : part.stop]]))
    return result


def repeated_attention(host: TorchHost, encoder: PromptEncoder, sequence: int, sinks: int) -> Tensor:
    """[L, Hkv, T] fp32: the most attention that each entry gets while the context is repeated, part by part.

    Every part has a copy of its own, gone when it is done. Raises PoolExhausted, before anything is run and with the
    sequence as it was, where the pool has no room for one.
    """
    pool, traits = host.pool, host.traits
    parts = repetitions(encoder, host.tokens[sequence])
    _require_room(host, sequence, max(len(each.tokens) for each in parts))
    largest = torch.zeros(traits.layers, traits.kv_heads, int(pool.lengths(sequence).max()), device=pool.device)
    for each in parts:
        copy = host.fork(sequence)
        try:
            observer = RepeatedAttention(pool, traits, copy, each.part, sinks)
            host.forward([Chunk(copy, each.tokens, [observer])])
        finally:
            host.release(copy)
        for (layer, head), rows in observer.rows.items():
            largest[layer, head, rows] = observer.largest[layer, head]
    return largest


def _require_room(host: TorchHost, sequence: int, growth: int) -> None:
    pool = host.pool
    needed = pool.owned_pages(sequence) + pool.pages_to_grow(sequence, growth)
    if needed > pool.free_pages:
        raise PoolExhausted(
            f"The context is scored by repeating it over a copy of its cache, which takes {needed} pages of "
            f"{pool.page_size} rows, and {pool.free_pages} of {pool.pages} are free. Nothing was run or evicted. Make "
            "the pool larger, release other sequences, or choose a policy that needs no copy."
        )
