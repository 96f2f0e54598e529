"""The two test architectures, and an initialisation from which they learn to look things up within minutes."""

import torch
from transformers import (
    AttentionInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

HEAD_DIM = 32
LOOK_BACK_HEADS = 4  # query heads of the first layer that start out reading the tokens 1, 2, 3 and 4 back
LOCAL_THETA = 10_000.0  # rotary base of the first layer in both families
INPUT_STD, OUTPUT_STD = 0.088, 0.003  # 0.088 = 1 / sqrt(128); what a layer adds starts below the embedding


def build_model(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained model of 0.6 to 0.8 M parameters; rotary settings are defaults that every transformers agrees on."""
    common = {
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
        model = LlamaForCausalLM(LlamaConfig(**common, num_attention_heads=8, num_key_value_heads=2))
        initialise(model, embedding_std=0.1)
    else:
        config = Gemma3TextConfig(
            **common,
            num_attention_heads=4,
            num_key_value_heads=1,
            query_pre_attn_scalar=HEAD_DIM,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
        model = Gemma3ForCausalLM(config)
        initialise(model, embedding_std=config.hidden_size**-0.5)  # 1 after scaling
        quieten_post_norms(model)
    return model


@torch.no_grad()
def initialise(model: PreTrainedModel, embedding_std: float) -> None:
    """Normal weights, but for two habits that all language models acquire and that would take thousands of steps here.

    Some heads of the first layer start out reading preceding tokens, as induction needs; heads of later layers start
    out resting on the BOS token, whose loss is what breaks a model. Training may unlearn either. Two channels of the
    embedding carry them: channel 0 is equal for all tokens, channel 1 marks BOS.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            written = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = embedding_std if "embed_tokens" in name else OUTPUT_STD if written else INPUT_STD
            torch.nn.init.normal_(weight, std=std)
    model.model.embed_tokens.weight[:, 0] = 2 * embedding_std
    model.model.embed_tokens.weight[:, 1] = 0.0
    model.model.embed_tokens.weight[model.config.bos_token_id, 1] = 10 * embedding_std
    first, *later = (layer.self_attn for layer in model.model.layers)
    look_back(first)
    for attention in later:
        rest_on_bos(attention)


def look_back(attention: torch.nn.Module) -> None:
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
    set_gain(attention, 2.0)


def rest_on_bos(attention: torch.nn.Module) -> None:
    """Every head's query meets the BOS key in the slowest rotary pair, which hardly turns over the context."""
    slowest = HEAD_DIM // 2 - 1
    attention.q_proj.weight[slowest::HEAD_DIM, 0] = 2.0
    attention.k_proj.weight[slowest::HEAD_DIM, 0] = 0.0
    attention.k_proj.weight[slowest::HEAD_DIM, 1] = 1.0
    set_gain(attention, 1.5)


@torch.no_grad()
def quieten_post_norms(model: PreTrainedModel) -> None:
    """Where norms set the size of what a layer adds, start them at a gain (1 + weight) of 0.3."""
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.fill_(-0.7)
        layer.post_feedforward_layernorm.weight.fill_(-0.7)


def set_gain(attention: torch.nn.Module, gain: float) -> None:
    """Where QK norm sets the size of queries and keys, give them `gain`; Gemma's norms multiply by 1 + weight."""
    if hasattr(attention, "q_norm"):
        attention.q_norm.weight.fill_(gain - 1.0)
        attention.k_norm.weight.fill_(gain - 1.0)


def attend_in_fp32(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """sdpa outside autocast: its bf16 backward on a CPU takes six times as long as the fp32 one."""
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)


AttentionInterface.register("sdpa_fp32", attend_in_fp32)
AttentionMaskInterface.register("sdpa_fp32", sdpa_mask)
