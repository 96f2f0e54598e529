"""One forward pass over packed sequences: who takes part, and what attention does in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.attention import AttentionTerms, attend, attend_frozen

ATTENTION_NAME = "bpkv"  # the name under which transformers finds `paged_attention`


Rope = tuple[Tensor, Tensor]  # cos, sin [n, D]


class Step(Protocol):
    """What a layer's attention does with its fresh queries, keys and values in this forward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [Hq, N, D]; k, v [Hkv, N, D], post-RoPE, of all packed tokens -> context [N, Hq, D]."""


class Observer(Protocol):
    """Sees what a policy `requires` beyond the scoring positions, while the tokens pass through."""

    needs_rope: bool

    def see(self, layer: int, q: Tensor, rope: Rope | None) -> None:
        """q [Hq, n, D]: the post-RoPE queries of the sequence's last n rows, already in the pool."""

    def compacted(self, plan: CompactionPlan) -> None:
        """Entries went: move what belongs to the others."""


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence."""

    sequence: int
    tokens: Sequence[int]
    observers: Sequence[Observer] = ()


class AppendStep:
    """Prefill and decode: write the tokens' rows into the pool, then attend to what the pool holds."""

    def __init__(self, pool: PagedKvPool, traits: ModelTraits, chunks: Sequence[Chunk]) -> None:
        self.pool, self.traits, self.chunks = pool, traits, chunks
        self.rope: dict[int, Rope] = {}  # per layer, of all packed tokens; only where an observer needs it

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = self.write_and_attend(layer, q, k, v)
        rope = self.rope.get(layer)
        for chunk, own in self._parts():
            for observer in chunk.observers:
                observer.see(layer, q[:, own], None if rope is None else (rope[0][own], rope[1][own]))
        return context

    def write_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `attend`, shown to nobody: [N, Hq, D]."""
        terms, contexts = AttentionTerms.of_layer(self.traits, layer), []
        for chunk, own in self._parts():
            self.pool.write(chunk.sequence, layer, k[:, own], v[:, own])
            contexts.append(attend(q[:, own], self.pool.heads(chunk.sequence, layer), terms))
        return (contexts[0] if len(contexts) == 1 else torch.cat(contexts, dim=1)).transpose(0, 1)

    def _parts(self) -> Iterator[tuple[Chunk, slice]]:
        start = 0
        for chunk in self.chunks:
            yield chunk, slice(start, start + len(chunk.tokens))
            start += len(chunk.tokens)


@dataclass(frozen=True)
class ReplayStep:
    """The last M tokens once more, each on its own path: every other token's K and V stay as they were cached.

    Nothing is written. `evicted` removes rows from attention, as an eviction would, without touching the pool.
    """

    pool: PagedKvPool
    traits: ModelTraits
    sequence: int
    evicted: Tensor | None = None  # [L, Hkv, T] bool
    queries: dict[int, Tensor] = field(default_factory=dict)  # per layer [M, Hq, D]
    contexts: dict[int, Tensor] = field(default_factory=dict)  # per layer [M, Hq, D], part of the autograd graph

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        terms = AttentionTerms.of_layer(self.traits, layer)
        evicted = None if self.evicted is None else self.evicted[layer]
        context = attend_frozen(q, k, v, self.pool.heads(self.sequence, layer), terms, evicted).transpose(0, 1)
        self.queries[layer], self.contexts[layer] = q.transpose(0, 1), context
        return context


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function given to transformers; the step that `TorchHost` passes along does the work.

    Wrappers of transformers' attention functions (kvpress's, for one) pass the first six by position.

    query [1, Hq, N, D], key and value [1, Hkv, N, D] of the packed tokens -> context [1, N, Hq, D].
    """
    step: Step = kwargs["bpkv_step"]
    return step.attend(int(module.layer_idx), query[0], key[0], value[0])[None], None  # type: ignore[arg-type]
