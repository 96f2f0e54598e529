"""Where the stages get one head at a time: its attention recomputed, its readout rows passed by layer."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.deletion import HeadAttention, read_shift, retained, singleton_scores
from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.held_rows import HeldRows
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits


class HeadSource(Protocol):
    """All that judging a mask needs, without holding more than one layer of it."""

    def attention(self, layer: int, head: int) -> HeadAttention:
        """One KV head at the scoring positions, over its physical rows."""

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """(layer, [M, C, Hkv, G, D] readout rows) of every compactable layer, as often as asked."""


class EvidenceSource:
    """The heads of one sequence, from its forward statistics and the rows in the pool."""

    def __init__(self, statistics: ForwardStatistics, view: HeldRows, traits: ModelTraits) -> None:
        assert traits.sink_logits == (statistics.sink_logits is not None), "the statistics contradict the traits"
        self.statistics = statistics
        self.view = view
        self.traits = traits

    def attention(self, layer: int, head: int) -> HeadAttention:
        group = slice(head * self.traits.group, (head + 1) * self.traits.group)
        sinks = self.statistics.sink_logits
        a = attention_weights(
            self.statistics.q[layer, :, group],
            self.view.keys(layer, head),
            self.traits.attention_scale,
            softcap=self.traits.attention_softcap,
            sink=None if sinks is None else sinks[layer, group],
        )
        return HeadAttention(
            a=a,
            c=self.statistics.context[layer, :, group].float(),
            v=self.view.values(layer, head).float(),
            sink_mass=None if sinks is None else (1 - a.sum(-1)).clamp_min_(0),
        )

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        assert self.statistics.readout is not None, "the host was not asked for a readout"
        for layer, rows in self.statistics.readout:
            positions, width, _, size = rows.shape
            yield layer, rows.view(positions, width, self.traits.kv_heads, self.traits.group, size)


@torch.no_grad()
def score_entries(statistics: ForwardStatistics, view: HeldRows, traits: ModelTraits) -> Tensor:
    """Singleton scores of a sequence's entries, [L, Hkv, T] fp32 with T the longest physical length.

    Rows beyond a head's length and layers outside the budget hold 0. NaN and Inf of the model come through.
    """
    assert statistics.readout is not None, "the host was not asked for a readout"
    source, divergence = EvidenceSource(statistics, view, traits), statistics.readout.divergence
    scores = torch.zeros(traits.layers, traits.kv_heads, int(view.lengths.max()), device=statistics.q.device)
    for layer, rows in source.rows():
        for head in range(traits.kv_heads):
            held = source.attention(layer, head)
            scores[layer, head, : held.v.shape[0]] = singleton_scores(
                held.a, held.c, held.v, rows[:, :, head], divergence
            )
    return scores


def mask_shift(source: HeadSource, evict: Tensor) -> Tensor:
    """[M, C]: the read-out shift of all entries of evict [L, Hkv, T] leaving together, summed over layers and heads."""
    total: Tensor | None = None
    for layer, rows in source.rows():
        for head in evict[layer].any(-1).nonzero().flatten().tolist():
            held = source.attention(layer, head)
            shift = read_shift(retained(held, evict[layer, head, : held.v.shape[0]]).shift, rows[:, :, head])
            total = shift if total is None else total + shift
        if total is None:
            total = rows.new_zeros(rows.shape[:2])
    assert total is not None, "a model without compactable layers has nothing to evict"
    return total


@torch.no_grad()
def mask_divergence(source: HeadSource, divergence: Divergence, evict: Tensor) -> float:
    """The estimate of stage 2 for any mask [L, Hkv, T]: the divergence of the shift that all its entries cause."""
    return float(divergence.of(mask_shift(source, evict)))
