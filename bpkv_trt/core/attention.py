"""The attention weights that the model used, of one KV head, recomputed from its queries and keys."""

import torch
from torch import Tensor


def attention_weights(
    q: Tensor, k: Tensor, scale: float, *, softcap: float | None = None, sink: Tensor | None = None
) -> Tensor:
    """Softmax weights of M consecutive positions, the last of which owns the last of T physical rows.

    q [M, G, D] post-RoPE queries of the head's group, k [T, D], any dtype; `sink` [G] is a logit that takes part in
    the denominator only, so the weights then sum to less than 1. Returns [G, M, T] fp32. Position m attends to the
    first T - (M - 1 - m) rows; the weight of a later row is exactly 0.
    """
    positions, group, width = q.shape
    rows = k.shape[0]
    assert rows >= positions, f"{positions} positions need as many rows of their own; there are {rows}"
    queries = q.float().transpose(0, 1).reshape(group * positions, width)
    logits = softcapped((queries @ k.float().T).mul_(scale), softcap).view(group, positions, rows)
    own = torch.ones(positions, positions, dtype=torch.bool, device=q.device).triu_(1)
    logits[:, :, rows - positions :].masked_fill_(own, float("-inf"))
    if sink is None:
        return torch.softmax(logits, dim=-1)
    sinks = sink.float()[:, None, None].expand(group, positions, 1)
    return torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(x / c) of scaled logits (Gemma 2), overwriting them; unchanged without a softcap."""
    return logits if softcap is None else logits.div_(softcap).tanh_() * softcap  # tanh's gradient needs its result
