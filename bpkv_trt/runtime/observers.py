"""What some policies need from every token that passes, gathered while it passes; state moves with the entries."""

import torch
from torch import Tensor

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.statistics import QueryMoments
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.attention import QUERY_BLOCK
from bpkv_trt.runtime.step import Rope


class ReceivedAttention:
    """The attention every entry has received from all queries so far, mean over the group (H2O's running sum)."""

    needs_rope = False

    def __init__(self, pool: PagedKvPool, traits: ModelTraits, sequence: int) -> None:
        self.pool, self.traits, self.sequence = pool, traits, sequence
        self.sums = {
            (layer, head): pool.keys.new_zeros(0, dtype=torch.float32)
            for layer in traits.compactable_layers
            for head in range(traits.kv_heads)
        }

    def see(self, layer: int, q: Tensor, rope: Rope | None) -> None:
        if layer in self.traits.sliding_layers:
            return
        view, group = self.pool.view(self.sequence), self.traits.group
        for head in range(self.traits.kv_heads):
            queries = q[head * group : (head + 1) * group].transpose(0, 1)  # [n, G, D]
            received = self._received(queries, view.keys(layer, head))
            before = self.sums[layer, head]
            received[: before.shape[0]] += before
            self.sums[layer, head] = received

    def _received(self, queries: Tensor, k: Tensor) -> Tensor:
        n, length = queries.shape[0], k.shape[0]
        received = torch.zeros(length, device=k.device)
        for start in range(0, n, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, n)
            seen = length - n + stop
            weights = attention_weights(
                queries[start:stop], k[:seen], self.traits.attention_scale, softcap=self.traits.attention_softcap
            )  # [G, block, seen]
            received[:seen] += weights.mean(0).sum(0)
        return received

    def forked(self, sequence: int) -> "ReceivedAttention":
        """The same of a copy of the sequence; neither sees what the other will."""
        copy = ReceivedAttention(self.pool, self.traits, sequence)
        copy.sums = dict(self.sums)  # `see` and `compacted` put new tensors in place of these
        return copy

    def compacted(self, plan: CompactionPlan) -> None:
        """Keep what the plan keeps, in its order."""
        for layer, head in self.sums:
            self.sums[layer, head] = self.sums[layer, head][torch.from_numpy(plan.kept(layer, head)).long()]

    def result(self) -> Tensor:
        """[L, Hkv, T] fp32, zero beyond a head's length and in sliding-window layers."""
        longest = max(sums.shape[0] for sums in self.sums.values())
        result = torch.zeros(self.traits.layers, self.traits.kv_heads, longest)
        for (layer, head), sums in self.sums.items():
            result[layer, head, : sums.shape[0]] = sums.cpu()
        return result


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
