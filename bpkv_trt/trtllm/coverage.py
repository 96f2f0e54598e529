"""Which networks of TensorRT-LLM scores can be put into, and why not into others.

What the checkpoint's configuration tells is refused by `Checkpoint.of`, and options by `conflicts.refuse_conflicts`:
both are known before the build begins.
"""

from collections.abc import Mapping
from typing import Any

from tensorrt_llm.layers import Attention

from bpkv_trt.errors import ConfigError
from bpkv_trt.trtllm.checkpoint import WITHOUT


def check_attention(layer: int, attention: Any) -> None:
    """Raises ConfigError for an attention that is not plain: fused, causal, RoPE by halves, no window."""
    if type(attention) is not Attention:
        raise ConfigError(
            f"The attention of layer {layer} is a {type(attention).__name__}, whose queries and keys BP-KV cannot turn "
            "to their logical positions: quantised attention (SmoothQuant, FP8 rowwise, QServe) and latent attention "
            f"(MLA) have forward passes of their own. Convert the checkpoint without it, {WITHOUT}."
        )
    position = attention.position_embedding_type.name
    if position != "rope_gpt_neox":
        raise ConfigError(
            f"The model's position embedding is {position}, and BP-KV applies rope_gpt_neox alone: from a compacted "
            f"cache the attention plugin would take {position} positions that are too small. Use another model, "
            f"{WITHOUT}."
        )
    unfit = {
        "rotary scaling that goes by the length (dynamic)": attention.rotary_embedding_scale_type.name == "dynamic",
        "RoPE on a part of each head": attention.rotary_embedding_dim != attention.attention_head_size,
        "logn scaling": attention.use_logn_scaling,
        "a relative attention bias": attention.relative_attention,
        "cross attention": attention.cross_attention,
        "local attention": attention.is_local,
        f"an attention mask ({attention.attention_mask_type.name})": attention.attention_mask_type.name != "causal",
    }
    for what, present in unfit.items():
        if present:
            raise ConfigError(
                f"The attention of layer {layer} has {what}, which goes by rows that are evicted or is not covered. "
                f"Use another model, {WITHOUT}."
            )


def check_inputs(given: Mapping[str, Any], table_rows: int) -> None:
    """given: the arguments of `prepare_inputs`. Raises ConfigError for steps that the runtime cannot compact between.

    table_rows: logical positions that the model's RoPE table has.
    """
    if given.get("max_beam_width", 1) > 1:
        raise ConfigError(
            f"max_beam_width is {given['max_beam_width']}: beams share the blocks of their prompt, and each would "
            f"evict from the others'. Give 1, {WITHOUT}."
        )
    if given.get("max_draft_len", 0) or given.get("speculative_decoding_draft_tokens_external", False):
        raise ConfigError(
            "The engine takes draft tokens (speculative decoding, Medusa, ReDrafter), and a step of the answer is one "
            f"token of each sequence. Leave them out, {WITHOUT}."
        )
    if given["max_seq_len"] > table_rows:
        raise ConfigError(
            f"max_seq_len is {given['max_seq_len']}, and the model's RoPE table has {table_rows} positions. Give "
            f"--max_seq_len {table_rows} or less."
        )


def check_prepared(inputs: Mapping[str, Any], tokens_per_block: int, page_size: int) -> None:
    """inputs: what the stock `prepare_inputs` made. Raises ConfigError where the cache is no pool of such blocks."""
    if inputs["kv_cache_params"].kv_cache_block_offsets is None or inputs["attention_params"].sequence_length is None:
        raise ConfigError(
            "The engine has no paged KV cache with the attention plugin, and entries are evicted from its pages. Build "
            f"with kv_cache_type paged and gpt_attention_plugin auto, which are the defaults, {WITHOUT}."
        )
    if tokens_per_block != page_size:
        raise ConfigError(
            f"tokens_per_block is {tokens_per_block}, and the kernels were compiled for blocks of {page_size} tokens: "
            "start the build with bpkv-trtllm-build, which reads the one from the other."
        )
