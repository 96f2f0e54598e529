"""Whether a run fits the machine, told before it starts."""

import torch

from bpkv_trt.config import PROBES, BpkvConfig
from bpkv_trt.core.deletion import SMALLEST_TILE, TILE_ELEMENTS
from bpkv_trt.errors import InputError
from bpkv_trt.host_memory import free_host_bytes
from bpkv_trt.models.loading import HostedModel, LoadedModel
from bpkv_trt.policies.registry import policy_class
from bpkv_trt.pool.storage import pages_of
from bpkv_trt.runtime.attention import QUERY_BLOCK

FP32, INT64 = 4, 8  # bytes


def activation_bytes(loaded: LoadedModel, tokens: int, config: BpkvConfig) -> int:
    """An upper estimate of what a run over `tokens` tokens holds at once, beside weights and cache.

    The prompt's forward and the scoring after it follow one another, so the larger of them counts. `config` is settled.
    """
    return max(_forward_bytes(loaded, tokens), scoring_bytes(loaded, tokens, config))


def _forward_bytes(loaded: LoadedModel, tokens: int) -> int:
    """The widest moment is a layer's MLP (gate, up and their product) or its attention (queries, context, K and V with
    their rotated copies), on top of five residual-sized tensors and two sets of cos and sin.

    A softcapped attention cannot be fused: five tensors of weights exist for a block of queries.
    """
    config, traits = loaded.model.config, loaded.traits
    attention = 3 * traits.head_dim * (traits.query_heads + traits.kv_heads)
    widest = max(3 * int(config.intermediate_size), attention)
    per_token = (5 * traits.width + widest) * next(loaded.model.parameters()).element_size()
    per_token += 4 * FP32 * traits.head_dim + 4 * INT64  # cos and sin; ids and positions
    logits = 3 * FP32 * int(config.vocab_size)  # as the head gives them, in fp32, and while they are checked
    weights = 5 * FP32 * traits.query_heads * min(QUERY_BLOCK, tokens) if traits.attention_softcap is not None else 0
    return tokens * (per_token + weights) + logits


def scoring_bytes(loaded: HostedModel, tokens: int, config: BpkvConfig) -> int:
    """An upper estimate of what scoring a cache of `tokens` tokens holds at once. `config` is settled.

    That is what is held all along, and the widest of replay, readout, scores and refinement; as fp32, M scoring
    positions. Attention weights exist for one KV head at a time, about five of a kind, [G, M, T].
    """
    traits, m, length = loaded.traits, config.replayed_positions, tokens + config.drafted
    heads = traits.query_heads * traits.head_dim
    held = m * (traits.layers * (2 * heads + traits.width) + 3 * int(loaded.model.config.vocab_size))
    attention = 5 * m * traits.group * length
    if "readout" not in policy_class(config.policy).requires:
        return FP32 * (held + attention)
    exact = config.readout == "exact"
    read = max(PROBES, m * config.probes_at(m)) if exact else m * config.top_k  # M C
    head_rows = 4 * m * config.top_k * traits.width  # of the LM head, [M, K, d], and what they become
    backward = 5 * read * traits.query_heads * length if exact else 0  # gradients of one layer's weights
    rows = read * heads  # of the readout, one layer's
    tile = 5 * read * min(length, max(SMALLEST_TILE, TILE_ELEMENTS // (traits.group * read)))
    candidates = 5 * 2 * config.refine * read * traits.group
    return FP32 * (held + max(head_rows + max(attention, backward), attention + 3 * rows + max(tile, candidates)))


def pool_bytes(loaded: HostedModel, rows: int, page_size: int) -> int:
    """Bytes of a pool of `rows` rows in every layer and head: K, V and positions."""
    traits = loaded.traits
    row = 2 * traits.head_dim * next(loaded.model.parameters()).element_size() + 4
    return pages_of(rows, page_size) * page_size * traits.layers * traits.kv_heads * row


def require_memory(needed: int, device: torch.device, limit: int | None, *, caches: int = 1) -> None:
    """Raise InputError where `needed` bytes are more than `limit`, or, without one, than the device has free.

    `caches`: how many are held at once, which the advice goes by.
    """
    available = limit if limit is not None else free_bytes(device)
    if needed > available:
        whose = "the limit given" if limit is not None else f"what is free on {device}"
        verify = "leave out --verify, which holds a second, full cache, " if caches > 1 else ""
        raise InputError(
            f"The prompt, its cache and the answer need about {needed / 2**20:,.0f} MiB beside the weights, more than "
            f"{whose}, {available / 2**20:,.0f} MiB. Nothing was run; shorten the prompt, ask for fewer new tokens, "
            f"use a narrower --dtype, {verify}or lower what was raised of "
            "--top-k, --probes, --refine and --positions."
        )


def require_scoring_memory(loaded: HostedModel, tokens: int, config: BpkvConfig, room: int) -> None:
    """Raise InputError where scoring `tokens` tokens takes more than `room` bytes. `config` is settled."""
    needed = scoring_bytes(loaded, tokens, config)
    if needed > room and not policy_class(config.policy).evicts_nothing:
        raise InputError(
            f"Scoring {tokens} tokens with these options takes about {needed / 2**20:,.0f} MiB, more than the "
            f"{room / 2**20:,.0f} MiB that the server had free when it started. Shorten the prompt or the answer, or "
            "lower what was raised of top_k, probes, refine and positions."
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()
