"""Mean and covariance of the queries that pass."""

import torch
from torch import Tensor

from bpkv_trt.core.statistics import QueryMoments
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.runtime.step import Rope


class QueryMomentsObserver:
    """Mean and covariance of the queries before RoPE, over all tokens but the sinks; no part belongs to an entry."""

    needs_rope = True

    def __init__(self, traits: ModelTraits, sinks: int, inverse_frequencies: tuple[Tensor, ...]) -> None:
        """`inverse_frequencies`: [D / 2] by layer, of a RoPE that turns the halves of a head against each other."""
        self.traits, self.sinks, self.inverse_frequencies = traits, sinks, inverse_frequencies
        heads, width = traits.query_heads, traits.head_dim
        self.count = [0] * traits.layers
        self.seen = [0] * traits.layers
        zero = torch.zeros((), dtype=torch.float64, device=inverse_frequencies[0].device)
        self.mean = zero.repeat(traits.layers, heads, width)
        self.scatter = zero.repeat(traits.layers, heads, width, width)

    def see(self, layer: int, q: Tensor, rope: Rope | None) -> None:
        assert rope is not None
        cos, sin = (side.double() for side in rope)  # [n, D]
        skip = max(0, self.sinks - self.seen[layer])
        self.seen[layer] += q.shape[1]
        queries = _unrotate(q.double(), cos, sin)[:, skip:]  # [Hq, n, D]
        if queries.shape[1] == 0:
            return
        self._merge(layer, queries)

    def _merge(self, layer: int, queries: Tensor) -> None:
        # Chan, Golub and LeVeque's pairwise update of mean and scatter.
        n, count = queries.shape[1], self.count[layer]
        mean = queries.mean(1)
        centred = queries - mean[:, None]
        delta = mean - self.mean[layer]
        self.scatter[layer] += centred.mT @ centred + delta[:, :, None] * delta[:, None] * (count * n / (count + n))
        self.mean[layer] += delta * (n / (count + n))
        self.count[layer] = count + n

    def forked(self, sequence: int) -> "QueryMomentsObserver":
        """The same of a copy of the sequence; neither sees what the other will."""
        copy = QueryMomentsObserver(self.traits, self.sinks, self.inverse_frequencies)
        copy.count, copy.seen = list(self.count), list(self.seen)
        copy.mean, copy.scatter = self.mean.clone(), self.scatter.clone()
        return copy

    def compacted(self, plan: CompactionPlan) -> None:
        """Queries are not entries: an eviction changes nothing here."""

    def result(self) -> QueryMoments:
        count = self.mean.new_tensor(self.count).clamp_min(1)[:, None, None, None]
        return QueryMoments(self.mean.float(), (self.scatter / count).float(), self.inverse_frequencies)


def _unrotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Inverse of q cos + rotate_half(q) sin; the norm cos^2 + sin^2 is not 1 where RoPE scales (YaRN).
    low, high = q.chunk(2, dim=-1)
    return (q * cos - torch.cat([-high, low], dim=-1) * sin) / (cos.square() + sin.square())
