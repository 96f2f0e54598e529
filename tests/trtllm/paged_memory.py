"""The pool of TensorRT-LLM in torch, and what its attention plugin and ours do with it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.deletion import singleton_scores
from bpkv_trt.core.divergence import TopKDivergence


class PagedMemory:
    """One pool [blocks, layers, K or V, Hkv, tokens of a block, D]. What nobody wrote is NaN."""

    def __init__(self, blocks: int, layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: Any) -> None:
        shape = (blocks, layers, 2, kv_heads, page_size, head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=dtype)
        self.page_size = page_size

    @property
    def addresses(self) -> Tensor:
        return torch.tensor([[self.pool.data_ptr()] * 2])

    def table(self, blocks: list[list[int]]) -> Tensor:
        """[1, B, 2, P] int32 kv_cache_block_offsets of sequences that hold these blocks, and what is far outside."""
        layers = self.pool.shape[1]
        table = torch.full((1, len(blocks), 2, max(map(len, blocks))), 10**8, dtype=torch.int32)
        for sequence, own in enumerate(blocks):
            for kind in range(2):
                table[0, sequence, kind, : len(own)] = torch.tensor(own) * 2 * layers + kind
        return table

    def rows(self, table: Tensor, layer: int, sequence: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V [Hkv, count, D] of a sequence's first rows, copied."""
        row = torch.arange(count)
        flat = self.pool.flatten(0, 2)  # a block of one layer and kind each
        offsets = table[0, sequence][:, row // self.page_size].long() + 2 * layer
        k, v = (flat[kind, :, row % self.page_size] for kind in offsets)
        return k.transpose(0, 1), v.transpose(0, 1)

    def write(self, table: Tensor, layer: int, sequence: int, first: int, k: Tensor, v: Tensor) -> None:
        """k, v [n, Hkv, D] from row `first` on."""
        row = torch.arange(first, first + len(k))
        for kind, given in enumerate((k, v)):
            blocks = table[0, sequence, kind, row // self.page_size].long() + 2 * layer
            self.pool.flatten(0, 2)[blocks, :, row % self.page_size] = given

    def attend(self, given: Mapping[str, Any], values: Mapping[str, Tensor | None]) -> Tensor:
        """`gpt_attention` on packed tokens [N, (Hq + 2 Hkv) D] -> [N, Hq D]; it turns q and k as its tables say.

        given: its arguments; values: those of its tensors. Positions are those of the rows, as the plugin takes them.
        """
        heads, kv_heads, width = given["num_heads"], given["num_kv_heads"], given["hidden_size_per_head"]
        table, lengths = values["kv_cache_block_offsets"], values["sequence_length"]
        context, generation = values["context_lengths"], values["host_request_types"]
        assert table is not None and lengths is not None and context is not None and generation is not None
        qkv = values["qkv"]
        assert qkv is not None
        if qkv.is_meta:
            return qkv.new_empty(len(qkv), heads * width)
        outputs, start = [], 0
        for sequence, length in enumerate(lengths.tolist()):
            count = 1 if generation[sequence] else int(context[sequence])
            part = qkv[start : start + count].view(count, heads + 2 * kv_heads, width)
            position = torch.arange(length - count, length)
            q, k = (
                turned(each, values["rotary_cos_sin"], position)
                for each in (part[:, :heads], part[:, heads : heads + kv_heads])
            )
            self.write(table, given["layer_idx"], sequence, length - count, k, part[:, heads + kv_heads :])
            outputs.append(self._attended(given, table, sequence, length, q))
            start += count
        assert start == len(qkv)
        return torch.cat(outputs).flatten(1).to(qkv.dtype)

    def _attended(self, given: Mapping[str, Any], table: Tensor, sequence: int, length: int, q: Tensor) -> Tensor:
        keys, values = self.rows(table, given["layer_idx"], sequence, length)
        count, heads, width = q.shape
        group = heads // len(keys)
        scale = 1 / (given["q_scaling"] * width**0.5)
        context = torch.empty(count, heads, width)
        for head, (k, v) in enumerate(zip(keys, values, strict=True)):
            columns = slice(head * group, (head + 1) * group)
            a = attention_weights(q[:, columns], k, scale)  # [G, count, length]
            context[:, columns] = (a @ v.float()).transpose(0, 1)
        return context

    def score(self, fields: Mapping[str, Any], *inputs: Tensor) -> Tensor:
        """`BpkvScore` by the core: its inputs and fields -> [B, Hkv, T] fp32."""
        q, context, readout, p, weights, offsets, table, lengths, addresses = inputs
        layer, kv_heads, group = (int(fields[name][0]) for name in ("layer_in_pool", "kv_heads", "query_heads"))
        group //= kv_heads
        longest = table.shape[3] * self.page_size if len(q) else 0
        scores = torch.zeros(len(lengths), kv_heads, longest, device=q.device)
        if q.is_meta:
            return scores
        assert addresses.tolist() == self.addresses.tolist()
        for sequence, length in enumerate(lengths.tolist()):
            span = slice(*offsets[sequence : sequence + 2].tolist())
            if span.start == span.stop:
                continue
            divergence = TopKDivergence(p[span], weights[span])
            for head, (k, v) in enumerate(zip(*self.rows(table, layer, sequence, length), strict=True)):
                columns = slice(head * group, (head + 1) * group)
                a = attention_weights(q[span, columns], k * fields["key_scale"][0], float(fields["scale"][0]))
                scores[sequence, head, :length] = singleton_scores(
                    a,
                    context[span, columns].float(),
                    v.float() * float(fields["value_scale"][0]),
                    readout[span, :, columns].float(),
                    divergence,
                )
        return scores


def turned(x: Tensor, table: Tensor | None, positions: Tensor) -> Tensor:
    """x [n, H, D] by halves, with the plugin's own table of (cos, sin) at rows of the cache."""
    assert table is not None
    half = x.shape[-1] // 2
    cos, sin = table.view(-1, half, 2)[positions].unbind(-1)
    low, high = x.float().unsqueeze(1).unflatten(-1, (2, half)).unbind(-2)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).squeeze(1).to(x.dtype)
