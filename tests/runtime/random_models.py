"""Random-weight models of every covered architecture, wrapped as the loader wraps them; no tokenizer is needed here."""

import copy
from functools import cache
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.models.traits_of import traits_of
from bpkv_trt.runtime.engine import Engine, make_pool
from tests.models.small_models import WINDOWED, configurations, random_model

ARCHITECTURES = tuple(configurations())
COMPACTABLE = tuple(name for name in ARCHITECTURES if name != "mistral_sliding")  # its layers all have a window
SMALL: dict[str, Any] = {"sinks": 2, "recent": 12, "positions": 5, "top_k": 16, "page_size": 4, "interval": 8}
BOS = 1
PEAK = 16.0  # of q_proj, or of q_norm where there is one: attention then rests on few entries, as a trained model's


@cache
def wrapped(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return peaked(name, configurations()[name], dtype)


def peaked(name: str, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A model of any configuration, with attention that rests on few entries."""
    model = random_model(config)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight.mul_(PEAK)
        if hasattr(attention, "q_norm"):
            attention.q_norm.weight.mul_(PEAK)
    frequencies = {key: buffer.clone() for key, buffer in model.named_buffers()}
    model = model.to(dtype)
    for key, buffer in model.named_buffers():
        buffer.data = frequencies[key]  # as from_pretrained leaves them, in fp32
    return LoadedModel(name, model, cast(Any, None), traits_of(model), cast(Any, None))


def model_with(name: str, layers: int, **changes: Any) -> LoadedModel:
    config = configurations()[name]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"] * layers if name == "qwen3" else WINDOWED * (layers // 2)
    for option, value in changes.items():
        setattr(config, option, value)
    return peaked(name, config)


def model_with_a_sink() -> LoadedModel:
    """A llama that rests its attention on token BOS, as trained models do on their first.

    A channel that only BOS has, far above all others, answers what all queries ask for in the pair of dimensions that
    RoPE hardly turns; the token's value is next to nothing.
    """
    loaded = model_with("llama_bias_rope", layers=2, tie_word_embeddings=False)
    model, size, width = loaded.model.model, loaded.traits.head_dim, loaded.traits.width
    slow = size // 2 - 1
    model.embed_tokens.weight[:, -1] = 0
    model.embed_tokens.weight[BOS] = 100 * torch.eye(width)[-1]
    for layer in model.layers:
        attention = layer.self_attn
        layer.input_layernorm.weight[-1] = 1
        attention.q_proj.weight.div_(PEAK)
        attention.q_proj.bias.view(-1, size)[:, slow] = 4
        attention.k_proj.bias.view(-1, size)[:, slow] = 0
        attention.k_proj.weight.view(-1, size, width)[:, slow] = 2 * torch.eye(width)[-1]
        attention.v_proj.weight[:, -1] = 0
        attention.v_proj.bias.zero_()
        for written in (attention.o_proj.weight, attention.o_proj.bias, layer.mlp.down_proj.weight):
            written[-1] = 0
    return loaded


def plain_copy(name: str) -> PreTrainedModel:
    """The same weights in a model of its own, which no host has touched."""
    model = copy.deepcopy(wrapped(name).model)
    model.set_attn_implementation("eager")
    return model


def engine_of(
    name: str, rows: int = 200, caches: int = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> Engine:
    return engine_on(wrapped(name, dtype), rows, caches, **options)


def engine_on(loaded: LoadedModel, rows: int = 200, caches: int = 4, **options: Any) -> Engine:
    config = BpkvConfig(**{**SMALL, "generation_budget": "14t", **options})
    return Engine(loaded, config, make_pool(loaded, rows, config.page_size, caches=caches, poison=True))


def random_tokens(seed: int, count: int) -> list[int]:
    """Tokens of the small models, none of them special."""
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
