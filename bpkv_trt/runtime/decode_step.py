"""One token of every sequence at once, by kernels: decoding on a GPU."""

from collections.abc import Sequence

from torch import Tensor

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.kernels.decode import paged_decode_attention
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.attention import AttentionTerms
from bpkv_trt.runtime.step import AppendStep, Chunk


class DecodeStep(AppendStep):
    """An `AppendStep` of chunks of one token each, over a pool that kernels work on."""

    def __init__(self, pool: PagedKvPool, traits: ModelTraits, chunks: Sequence[Chunk]) -> None:
        super().__init__(pool, traits, chunks)
        sequences = [chunk.sequence for chunk in chunks]
        self.caches, self.rows = pool.caches(sequences), pool.last_rows(sequences)

    def write_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write_rows(self.rows[layer], k, v)
        terms = AttentionTerms.of_layer(self.traits, layer)
        context, _ = paged_decode_attention(
            q.transpose(0, 1).contiguous(),
            self.caches[layer],
            scale=terms.scale,
            softcap=terms.softcap,
            window=terms.window,
        )
        return context
