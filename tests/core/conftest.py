"""Synthetic sequences whose attention is peaked as a trained model's is, and the float64 truth about them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.core.divergence import Divergence, TopKDivergence
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits


@dataclass
class Rows:
    """The keys and values of one sequence: what scoring reads of a pool's view."""

    k: list[list[Tensor]]  # [layer][head] [n, D]
    v: list[list[Tensor]]

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([[k.shape[0] for k in heads] for heads in self.k], dtype=np.int32)

    def keys(self, layer: int, head: int) -> Tensor:
        return self.k[layer][head]

    def values(self, layer: int, head: int) -> Tensor:
        return self.v[layer][head]


@dataclass
class FixedReadout:
    rows: list[tuple[int, Tensor]]
    divergence: Divergence

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return iter(self.rows)


@dataclass
class Sequence:
    statistics: ForwardStatistics
    view: Rows
    traits: ModelTraits

    def exact_weights(self, layer: int, keep: Tensor) -> Tensor:
        """[Hq, M, T] float64 softmax over the rows of keep [Hkv, T] alone, one query at a time."""
        q = self.statistics.q[layer].double()
        positions, heads, _ = q.shape
        weights = torch.zeros(heads, positions, keep.shape[-1], dtype=torch.float64)
        for head in range(heads):
            own = head // self.traits.group
            k = self.view.k[layer][own].double()
            for m in range(positions):
                seen = keep[own, : k.shape[0]].clone()
                seen[k.shape[0] - (positions - 1 - m) :] = False
                logits = k[seen] @ q[m, head] * self.traits.attention_scale
                if self.traits.attention_softcap is not None:
                    logits = torch.tanh(logits / self.traits.attention_softcap) * self.traits.attention_softcap
                if self.statistics.sink_logits is not None:
                    logits = torch.cat([logits, self.statistics.sink_logits[layer, head].double()[None]])
                share = torch.softmax(logits, 0)
                weights[head, m, : k.shape[0]][seen] = share[: int(seen.sum())]
        return weights

    def exact_context(self, layer: int, keep: Tensor) -> Tensor:
        """[M, Hq, D] float64."""
        a = self.exact_weights(layer, keep)
        values = [self.view.v[layer][head // self.traits.group].double() for head in range(a.shape[0])]
        return torch.stack([a[head][:, : v.shape[0]] @ v for head, v in enumerate(values)], 1)

    def exact_shift(self, evict: Tensor) -> Tensor:
        """[M, C] float64: the read-out shift when the entries of evict [L, Hkv, T] leave, by attending again."""
        assert self.statistics.readout is not None
        total = torch.zeros(1, dtype=torch.float64)
        for layer, rows in self.statistics.readout:
            everything = torch.ones_like(evict[layer])
            moved = self.exact_context(layer, ~evict[layer]) - self.exact_context(layer, everything)
            total = total + torch.einsum("mhd,mchd->mc", moved, rows.double())
        return total

    def exact_kl(self, evict: Tensor) -> float:
        assert self.statistics.readout is not None
        return float(exact_kl(self.statistics.topk_p, self.exact_shift(evict)))


def exact_kl(p: Tensor, shift: Tensor) -> Tensor:
    """Mean KL in float64 for shift [..., M, K]; expm1 keeps it right to 1e-10 of 1e-12."""
    p, shift = p.double() / p.double().sum(-1, keepdim=True), shift.double()
    shift = shift - (p * shift).sum(-1, keepdim=True)
    return (torch.log1p((p * torch.expm1(shift)).sum(-1)) - (p * shift).sum(-1)).mean(-1)


def make_sequence(
    *,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    rows: int | list[list[int]] = 60,
    positions: int = 4,
    logits: int = 12,
    sharpness: float = 2.0,
    readout_scale: float = 0.3,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Sequence:
    """Random heads; the first row is an attention sink with a small value, as trained models have."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [[rows] * kv_heads] * layers if isinstance(rows, int) else rows
    heads = kv_heads * group
    q = torch.randn(layers, positions, heads, head_dim, generator=draw) * sharpness
    k = [[torch.randn(n, head_dim, generator=draw) for n in each] for each in lengths]
    offset = torch.randn(head_dim, generator=draw)  # values share a common part, which no eviction moves
    v = [[torch.randn(n, head_dim, generator=draw) + offset for n in each] for each in lengths]
    for layer in range(layers):
        for head in range(kv_heads):
            own = q[layer, :, head * group : (head + 1) * group].mean((0, 1))
            k[layer][head][0] = own / own.norm() * 4
            v[layer][head][0] *= 0.1
    p = torch.softmax(torch.randn(positions, logits, generator=draw) * 2, -1)
    g = torch.randn(layers, positions, logits, heads, head_dim, generator=draw) * readout_scale
    g = g - torch.einsum("mk,lmkhd->lmhd", p, g)[:, :, None]
    traits = ModelTraits(
        "synthetic", layers, heads, kv_heads, head_dim, heads * head_dim, 1000, head_dim**-0.5,
        attention_softcap=softcap, sink_logits=sinks,
    )  # fmt: skip
    longest = max(max(each) for each in lengths)
    statistics = ForwardStatistics(
        q=q,
        context=torch.zeros(layers, positions, heads, head_dim),
        residual=torch.zeros(positions, traits.width),
        topk_ids=torch.zeros(positions, logits, dtype=torch.int64),
        topk_p=p,
        covered_mass=torch.ones(positions),
        positions=torch.arange(longest - positions, longest),
        readout=FixedReadout([(layer, g[layer]) for layer in reversed(range(layers))], TopKDivergence(p)),
        sink_logits=torch.randn(layers, heads, generator=draw) if sinks else None,
    )
    sequence = Sequence(statistics, Rows(k, v), traits)
    everything = torch.ones(kv_heads, longest, dtype=torch.bool)
    for layer in range(layers):
        statistics.context[layer] = sequence.exact_context(layer, everything).float()
    return sequence


@pytest.fixture
def sequence_of() -> Callable[..., Sequence]:
    return make_sequence


@pytest.fixture
def kl_of() -> Callable[[Tensor, Tensor], Tensor]:
    return exact_kl


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
