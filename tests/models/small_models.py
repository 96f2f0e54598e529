"""Small random models of every covered architecture, with the switches of each turned on."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = ["sliding_attention", "full_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def configurations() -> dict[str, PretrainedConfig]:
    """One configuration for every family and every switch that changes the path from attention to logits."""
    gemma = dict(SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=8, layer_types=WINDOWED)
    return {
        "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
        "llama_bias_rope": LlamaConfig(**SIZES, attention_bias=True, head_dim=16, rope_scaling=LLAMA3_ROPE),
        "mistral": MistralConfig(**SIZES, sliding_window=None),
        "mistral_sliding": MistralConfig(**SIZES, sliding_window=8),
        "qwen2": Qwen2Config(**SIZES),
        "qwen2_sliding": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "qwen3": Qwen3Config(**SIZES, head_dim=16),
        "gemma2": Gemma2Config(**gemma, attn_logit_softcapping=0.5, final_logit_softcapping=2.0),
        "gemma3": Gemma3TextConfig(**gemma),
        "gemma3_final_softcap": Gemma3TextConfig(**gemma, final_logit_softcapping=2.0),
        "cohere": CohereConfig(**SIZES, logit_scale=0.25),
        "cohere_qk_norm": CohereConfig(**SIZES, use_qk_norm=True),
        "granite": GraniteConfig(
            **SIZES, attention_multiplier=0.4, residual_multiplier=0.3, logits_scaling=3.0, embedding_multiplier=2.0
        ),
    }


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose every parameter is random: norms of ones and biases of zeros would hide faults."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model
