"""What a forward pass must leave behind for an eviction to be judged."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bpkv_trt.core.divergence import Divergence
from bpkv_trt.core.rehearsal import Rehearsal


class Readout(Protocol):
    """How a shift of one attention output moves the next-token distribution.

    Iterating yields `(layer, rows)` for every compactable layer, in any order and as often as asked, with `rows`
    [M, K or R, Hq, D] fp32, centred: `divergence` measures the shifts that these rows read.
    """

    @property
    def divergence(self) -> Divergence: ...

    def __iter__(self) -> Iterator[tuple[int, Tensor]]: ...


class OutputProjections(Protocol):
    """The weights W_O that take the attention outputs of a layer to its residual; a host's own, not a copy."""

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """W_O [d, Hq D] and its bias [d]."""


@dataclass(frozen=True)
class QueryMoments:
    """Mean and covariance of the queries so far, before RoPE; for policies that require `query_moments`."""

    mean: Tensor  # [L, Hq, D] fp32
    covariance: Tensor  # [L, Hq, D, D] fp32
    inverse_frequencies: tuple[Tensor, ...]  # per layer [D / 2], to rotate the moments to future positions


@dataclass(frozen=True)
class ForwardStatistics:
    """One sequence at its scoring positions: the last M logical positions. All of it lies on the cache's device.

    The first seven fields are what every host supplies; the optional ones are there when the policy's `requires` asked
    for them.
    """

    q: Tensor  # [L, M, Hq, D] post-RoPE queries
    context: Tensor  # [L, M, Hq, D] attention output before W_O
    residual: Tensor  # [M, d] input of the final norm
    topk_ids: Tensor  # [M, K] int64
    topk_p: Tensor  # [M, K] fp32, renormalised over the top K
    covered_mass: Tensor  # [M] fp32, what the top K hold of the full distribution
    positions: Tensor  # [M] int64, logical
    drafted: int = 0  # how many of the positions, the last ones, are a draft that will be taken back
    readout: Readout | None = None
    scores: Tensor | None = None  # [L, Hkv, T] fp32 singleton scores by that readout, where the host has scored already
    received_attention: Tensor | None = None  # [L, Hkv, T] fp32, by the policy's `running_attention`
    replay_attention: Tensor | None = None  # [L, Hkv, T] fp32, the most received while the context was repeated
    rehearsal: Rehearsal | None = None  # where the compaction asked for one
    query_moments: QueryMoments | None = None
    projections: OutputProjections | None = None  # for policies that require `output_projection`
    sink_logits: Tensor | None = None  # [L, Hq] where the model has a learned logit in each softmax's denominator

    def __post_init__(self) -> None:
        m = self.positions.shape[0]
        assert self.q.shape == self.context.shape and self.q.shape[1] == m
        assert self.topk_ids.shape == self.topk_p.shape and self.topk_p.shape[0] == m
        assert self.residual.shape[0] == m and self.covered_mass.shape == (m,)
