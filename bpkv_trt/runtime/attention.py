"""Attention over the rows of the pool: what a model's layers call in place of their own."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bpkv_trt.core.attention import softcapped
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.rows import LayerRows

QUERY_BLOCK = 256  # queries whose mask or weights exist at once, so that memory stays linear in the cached tokens


@dataclass(frozen=True)
class AttentionTerms:
    """What one layer adds to plain scaled dot-product attention."""

    scale: float
    softcap: float | None = None
    window: int | None = None

    @classmethod
    def of_layer(cls, traits: ModelTraits, layer: int) -> "AttentionTerms":
        window = traits.sliding_window if layer in traits.sliding_layers else None
        return cls(traits.attention_scale, traits.attention_softcap, window)


def attend(q: Tensor, rows: LayerRows, terms: AttentionTerms) -> Tensor:
    """Attention of n new tokens of one sequence over its cached rows, the new tokens' own included.

    q: [Hq, n, D], the queries of the last n rows; query i sees the first `length - (n - 1 - i)` rows of every head.
    Returns [Hq, n, D] in q's dtype.
    """
    if rows.uniform is not None:
        return _attend_heads(q, *rows.uniform, terms)
    group = q.shape[0] // len(rows.lengths)
    contexts = []
    for head in range(len(rows.lengths)):
        k, v = rows.head(head)
        contexts.append(_attend_heads(q[head * group : (head + 1) * group], k[None], v[None], terms))
    return torch.cat(contexts)


def _attend_heads(q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms) -> Tensor:
    # q [H * G, n, D]; k, v [H, T, D]
    n, length = q.shape[1], k.shape[1]
    windowed = terms.window is not None and length > terms.window
    plain = terms.softcap is None and not windowed
    if plain and n == 1:
        return _decode(q, k, v, terms.scale)
    if plain and n == length:
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=terms.scale, enable_gqa=True
        )[0]
    blocks = [_attend_block(q, k, v, start, min(start + QUERY_BLOCK, n), terms) for start in range(0, n, QUERY_BLOCK)]
    return torch.cat(blocks, dim=1)


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    # The group's queries take the place of query positions: K and V are read once per KV head.
    grouped = q.view(1, k.shape[0], -1, q.shape[-1])  # [1, H, G, D]
    return F.scaled_dot_product_attention(grouped, k[None], v[None], scale=scale).view_as(q)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int, terms: AttentionTerms) -> Tensor:
    n, length = q.shape[1], k.shape[1]
    last = length - n + stop  # rows that the block's last query sees
    first = 0 if terms.window is None else max(0, length - n + start + 1 - terms.window)
    q, k, v = q[:, start:stop], k[:, first:last], v[:, first:last]
    visible = _visible(stop - start, last - first, terms.window, q.device)
    if terms.softcap is None:
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=terms.scale, enable_gqa=True
        )[0]
    heads, width = k.shape[0], k.shape[2]
    logits = q.reshape(heads, -1, width).float() @ k.float().mT  # [H, G * n, T]: a group reads K and V once
    weights = _weights(logits.view(heads, -1, stop - start, last - first), visible, terms)
    return (weights.flatten(1, 2) @ v.float()).view(q.shape).to(q.dtype)


def _visible(queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, length] bool for queries that are the last rows of `length`."""
    own = torch.arange(length - queries, length, device=device)[:, None]
    row = torch.arange(length, device=device)[None]
    visible = row <= own
    return visible if window is None else visible & (row > own - window)


def _weights(logits: Tensor, visible: Tensor, terms: AttentionTerms) -> Tensor:
    """Raw q.k in fp32 [..., n, T] -> attention weights."""
    logits = softcapped(logits * terms.scale, terms.softcap)
    return torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1)


def attend_frozen(
    q: Tensor, k: Tensor, v: Tensor, rows: LayerRows, terms: AttentionTerms, evicted: Tensor | None = None
) -> Tensor:
    """Attention of the last M tokens run again, differentiable in their own q, k and v alone.

    q: [Hq, M, D]; k, v: [Hkv, M, D], the tokens' own, used on the diagonal only: what other positions read of them is
    the cached row. evicted: [Hkv, T] bool, rows that no position sees. Returns [Hq, M, D] in q's dtype.
    """
    group = q.shape[0] // len(rows.lengths)
    contexts = []
    for head in range(len(rows.lengths)):
        queries = q[head * group : (head + 1) * group]
        gone = None if evicted is None else evicted[head]
        contexts.append(_attend_frozen_head(queries, k[head], v[head], *rows.head(head), terms, gone))
    return torch.cat(contexts)


def _attend_frozen_head(
    q: Tensor, k: Tensor, v: Tensor, cached_k: Tensor, cached_v: Tensor, terms: AttentionTerms, evicted: Tensor | None
) -> Tensor:
    # q [G, M, D]; k, v [M, D]; cached [T, D]. Plain matrix products: batched ones would, under a batched backward,
    # copy K and V once per probe.
    m, length = q.shape[1], cached_k.shape[0]
    queries = q.float()
    own = torch.arange(length - m, length, device=q.device)
    diagonal = own[:, None] == torch.arange(length, device=q.device)  # [M, T]
    visible = _visible(m, length, terms.window, q.device)
    if evicted is not None:
        visible = visible & ~evicted[:length]
    own_logit = (queries * k.float()).sum(-1, keepdim=True)  # [G, M, 1]
    cached = (queries.flatten(0, 1) @ cached_k.float().T).view(-1, m, length)  # [G, M, T]
    weights = _weights(torch.where(diagonal, own_logit, cached), visible, terms)
    others = (weights.masked_fill(diagonal, 0.0).flatten(0, 1) @ cached_v.float()).view_as(queries)
    own_weight = weights.gather(-1, own[:, None].expand(*weights.shape[:2], 1))
    return (others + own_weight * v.float()).to(q.dtype)
