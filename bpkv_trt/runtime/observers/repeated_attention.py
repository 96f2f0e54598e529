"""What a part of the context receives while it is repeated."""

import torch
from torch import Tensor

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.attention import QUERY_BLOCK
from bpkv_trt.runtime.step import Rope


class RepeatedAttention:
    """The largest attention that each entry of a part gets from the queries that pass, which must come all at once.

    The softmax goes over the sinks, the part and the passing tokens' own rows, as in KVzip: what lies between takes no
    share, so that parts can be compared with one another.
    """

    needs_rope = False

    def __init__(self, pool: PagedKvPool, traits: ModelTraits, sequence: int, part: range, sinks: int) -> None:
        """`part`: logical positions; `sinks`: how many first positions take part in the softmax beside it."""
        self.pool, self.traits, self.sequence = pool, traits, sequence
        self.bounds = torch.tensor([min(sinks, part.start), part.start, part.stop], device=pool.device)
        self.largest: dict[tuple[int, int], Tensor] = {}  # by (layer, KV head) [rows of the part]
        self.rows: dict[tuple[int, int], slice] = {}  # where these are

    def see(self, layer: int, q: Tensor, rope: Rope | None) -> None:
        if layer in self.traits.sliding_layers:
            return
        view, group = self.pool.view(self.sequence), self.traits.group
        for head in range(self.traits.kv_heads):
            sinks, first, stop = torch.searchsorted(view.positions(layer, head).long(), self.bounds).tolist()
            k, own = view.keys(layer, head), q.shape[1]
            kept = torch.cat([k[:sinks], k[first:stop], k[-own:]])
            queries = q[head * group : (head + 1) * group].transpose(0, 1)  # [n, G, D]
            self.rows[layer, head] = slice(first, stop)
            self.largest[layer, head] = self._largest(queries, kept)[sinks : sinks + stop - first]

    def _largest(self, queries: Tensor, k: Tensor) -> Tensor:
        """[R]: the most that the rows k [R, D] get from queries [n, G, D], which own the last n of them."""
        n, largest = queries.shape[0], torch.zeros(k.shape[0], device=k.device)
        for start in range(0, n, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, n)
            seen = k.shape[0] - n + stop
            a = attention_weights(
                queries[start:stop], k[:seen], self.traits.attention_scale, softcap=self.traits.attention_softcap
            )  # [G, block, seen]
            largest[:seen] = torch.maximum(largest[:seen], a.amax((0, 1)))
        return largest

    def compacted(self, plan: CompactionPlan) -> None:
        """The copy that is observed is never compacted."""
        raise AssertionError("a repetition is not compacted")
