"""What judging entries, and masks of them, asks of a sequence; and the scores of both."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.deletion import HeadAttention, Retained, read_shift
from bpkv_trt.core.divergence import Divergence


@dataclass(frozen=True)
class Boundary:
    """H heads of a layer under two masks, and P of their entries, by head and row."""

    before: Retained  # [H, G, M] and [H, G, M, D]
    after: Retained
    a: Tensor  # [P, G, M] fp32
    values: Tensor  # [P, D] fp32 v less the head's centre, as in `Retained.context`


class LayerEvidence(Protocol):
    """One layer at the scoring positions, all that is asked of it."""

    @property
    def rows(self) -> Tensor:
        """[M, C, Hkv, G, D] readout rows."""

    def singleton_scores(self, divergence: Divergence) -> Tensor:
        """[Hkv, T] fp32, the divergence that evicting each entry alone would cause; 0 past a head's end."""

    def retained(self, evict: Tensor) -> Retained:
        """All heads, [Hkv, ...], without the entries of evict [Hkv, T] bool."""

    def nomination(self, evict: Tensor, slopes: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        """What evicting each kept entry, or having evicted each gone one, costs to first order; and whether it may go.

        evict [Hkv, T] bool; slopes [Hkv, G, M, D] readout rows weighted by the divergence's gradient; least [Hkv] the
        mass that a head must retain. Returns [Hkv, T] fp32 and [Hkv, T] bool: sum over (g, m) of
        a / left (c' - v).slope, and left >= least, left being the mass after the entry has gone, or come back.
        """

    def boundary(self, members: Tensor, before: Tensor, after: Tensor) -> Boundary:
        """The heads that have members, and these, under two masks; all three [Hkv, T] bool."""


class Evidence(Protocol):
    """One sequence: all that the stages ask, without holding more than one layer of it."""

    def attention(self, layer: int, head: int) -> HeadAttention:
        """One KV head at the scoring positions, over its physical rows."""

    def retained_mass(self, layer: int, evict: Tensor) -> Tensor:
        """[Hkv, G, M] fp32, what all heads of a layer keep of their attention without evict [Hkv, T] bool."""

    def layers(self) -> Iterator[tuple[int, LayerEvidence]]:
        """Every compactable layer, in any order, as often as asked."""

    def empty_table(self) -> Tensor:
        """[L, Hkv, T] fp32 zeros, T the longest physical length."""

    def choose(
        self, pool: CandidatePool, base: Tensor, unit: Tensor, shares: Tensor, floor: Tensor, divergence: Divergence
    ) -> tuple[Tensor, Tensor]:
        """`candidates.choose`, where the pool lies."""


@torch.no_grad()
def score_entries(source: Evidence, divergence: Divergence) -> Tensor:
    """Singleton scores of a sequence's entries, [L, Hkv, T] fp32 with T the longest physical length.

    Rows beyond a head's length and layers outside the budget hold 0. NaN and Inf of the model come through.
    """
    scores = source.empty_table()
    for layer, held in source.layers():
        scores[layer] = held.singleton_scores(divergence)
    return scores


def mask_shift(source: Evidence, evict: Tensor) -> Tensor:
    """[M, C]: the read-out shift of all entries of evict [L, Hkv, T] leaving together, summed over layers and heads."""
    total: Tensor | None = None
    for layer, held in source.layers():
        if total is None:
            total = held.rows.new_zeros(held.rows.shape[:2])
        if bool(evict[layer].any()):
            total = total + read_shift(held.retained(evict[layer]).shift, held.rows)
    assert total is not None, "a model without compactable layers has nothing to evict"
    return total


@torch.no_grad()
def mask_divergence(source: Evidence, divergence: Divergence, evict: Tensor) -> float:
    """The estimate of stage 2 for any mask [L, Hkv, T]: the divergence of the shift that all its entries cause."""
    return float(divergence.of(mask_shift(source, evict)))
