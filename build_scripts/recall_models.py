"""The two test architectures, and an initialisation from which they learn to look things up within minutes."""

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HEAD_DIM = 32
LOOK_BACK_HEADS = 4  # query heads of the first layer that start out reading the tokens 1, 2, 3 and 4 back
LOCAL_THETA = 10_000.0  # rotary base of the first layer in both families
INPUT_STD, OUTPUT_STD = 0.088, 0.003  # 0.088 = 1 / sqrt(128); what a layer adds starts below the embedding


def build_model(family: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM | Gemma3ForCausalLM:
    """An untrained model of 0.6 to 0.8 M parameters; rotary settings are defaults that every transformers agrees on."""
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "llama":
        llama = LlamaForCausalLM(LlamaConfig(**common, num_attention_heads=8, num_key_value_heads=2))
        initialise(llama, embedding_std=0.1)
        return llama
    config = Gemma3TextConfig(
        **common,
        num_attention_heads=4,
        num_key_value_heads=1,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    gemma = Gemma3ForCausalLM(config)
    initialise(gemma, embedding_std=common["hidden_size"] ** -0.5)  # 1 after scaling
    quieten_post_norms(gemma)
    return gemma


@torch.no_grad()
def initialise(model: LlamaForCausalLM | Gemma3ForCausalLM, embedding_std: float) -> None:
    """Normal weights, except that some heads of the first layer start out reading preceding tokens.

    Induction needs a head that reads the token before; from random weights it takes thousands of steps to appear, from
    here about a hundred. The heads' queries and keys come from an embedding channel that is equal for all tokens.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            written = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = embedding_std if "embed_tokens" in name else OUTPUT_STD if written else INPUT_STD
            torch.nn.init.normal_(weight, std=std)
    model.model.embed_tokens.weight[:, 0] = 2 * embedding_std
    look_back(model.model.layers[0].self_attn)


def look_back(attention: Any) -> None:
    """Query heads 0 to 3 read the token 1, 2, 3 and 4 back.

    Their key is a constant u, their query u turned back by d positions: the score u.R(distance - d)u peaks d back.
    """
    half = HEAD_DIM // 2
    frequencies = LOCAL_THETA ** (-torch.arange(half) / half)  # [D/2] radians per token
    sharp = (torch.arange(half) < 4).float()  # the four fastest rotary pairs tell neighbours apart
    attention.k_proj.weight[:HEAD_DIM] *= 0.1
    attention.k_proj.weight[:half, 0] = sharp
    for head in range(LOOK_BACK_HEADS):
        angle = (head + 1) * frequencies
        rows = attention.q_proj.weight[head * HEAD_DIM : (head + 1) * HEAD_DIM]  # [D, d]
        rows *= 0.1
        rows[:, 0] = 10 * torch.cat([sharp * angle.cos(), -sharp * angle.sin()])
    if hasattr(attention, "q_norm"):  # sets the size of queries and keys, with a gain of 1 + weight
        attention.q_norm.weight.fill_(1.0)
        attention.k_norm.weight.fill_(1.0)


@torch.no_grad()
def quieten_post_norms(model: Gemma3ForCausalLM) -> None:
    """Where norms set the size of what a layer adds, start them at a gain (1 + weight) of 0.3."""
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.fill_(-0.7)
        layer.post_feedforward_layernorm.weight.fill_(-0.7)
