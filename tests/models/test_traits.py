"""ModelTraits and ModelWeights reproduce each architecture's own attention, residual path and logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.models.modules import (
    attention_module,
    decoder_layers,
    final_norm_module,
    output_projection_module,
)
from bpkv_trt.models.traits_of import traits_of
from bpkv_trt.models.weights import ModelWeights
from tests.models.small_models import configurations, random_model

CONFIGURATIONS = configurations()
TOKENS = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(1))
every_model = pytest.mark.parametrize("name", CONFIGURATIONS)


def model_of(name: str) -> PreTrainedModel:
    return random_model(CONFIGURATIONS[name])


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def rms_normed(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma


def attention_by_traits(traits: ModelTraits, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Context [T, Hq, D] for q [Hq, T, D] and k, v [Hkv, T, D], from nothing but the traits."""
    grouped = q.unflatten(0, (traits.kv_heads, traits.group))  # [Hkv, group, T, D]
    logits = softcapped(torch.einsum("ghtd,gsd->ghts", grouped, k) * traits.attention_scale, traits.attention_softcap)
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None, :]
    seen = distance >= 0
    if layer in traits.sliding_layers:
        assert traits.sliding_window is not None
        seen &= distance < traits.sliding_window
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("ghts,gsd->tghd", weights, v).flatten(1, 2)


def eager_contexts(model: PreTrainedModel) -> tuple[list[Tensor], Tensor]:
    """What each layer's output projection receives under transformers' own eager attention, and the logits."""
    contexts: list[Tensor] = []
    hooks = [
        output_projection_module(layer).register_forward_pre_hook(lambda _, args: contexts.append(args[0][0]))
        for layer in decoder_layers(model)
    ]
    logits = model(input_ids=TOKENS, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return contexts, logits


@every_model
def test_attention_recomputed_from_the_traits_is_the_attention_of_the_forward(name: str) -> None:
    model = model_of(name)
    traits = traits_of(model)
    contexts, logits = eager_contexts(model)
    recomputed: list[Tensor] = []

    def by_traits(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        recomputed.append(attention_by_traits(traits, module.layer_idx, q[0], k[0], v[0]))
        return recomputed[-1][None], None

    AttentionInterface.register("recomputed", by_traits)
    model.set_attn_implementation("recomputed")
    through_traits = model(input_ids=TOKENS, use_cache=False).logits[0]
    for own, ours in zip(contexts, recomputed, strict=True):
        torch.testing.assert_close(ours.flatten(1), own, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(through_traits, logits, rtol=1e-4, atol=1e-5)


@every_model
def test_attention_branch_enters_the_residual_as_the_traits_say(name: str) -> None:
    model = model_of(name)
    traits, weights = traits_of(model), ModelWeights(model)
    for layer in decoder_layers(model):
        layer.mlp.down_proj.weight.zero_()  # leaves the attention branch alone in the residual path
    entered: list[Tensor] = []
    left: list[Tensor] = []
    hooks = [
        handle
        for layer in decoder_layers(model)
        for handle in (
            layer.register_forward_pre_hook(lambda _, args: entered.append(args[0][0])),
            layer.register_forward_hook(
                lambda _, __, output: left.append((output[0] if isinstance(output, tuple) else output).view(24, -1))
            ),
        )
    ]
    contexts, _ = eager_contexts(model)
    assert len(hooks) == 4 and len(left) == traits.layers
    for layer, context in enumerate(contexts):
        projection, bias = weights.output_projection(layer)
        branch = context @ projection.T + (0 if bias is None else bias)
        norm = weights.post_attention_norm(layer)
        assert (norm is not None) == traits.post_attention_norm
        if norm is not None:
            branch = rms_normed(branch, *norm)
        expected = entered[layer] + traits.residual_multiplier * branch
        torch.testing.assert_close(left[layer], expected, rtol=1e-5, atol=1e-5)


@every_model
def test_logits_follow_from_the_last_residual(name: str) -> None:
    model = model_of(name)
    traits, weights = traits_of(model), ModelWeights(model)
    residuals: list[Tensor] = []
    final_norm_module(model).register_forward_pre_hook(lambda _, args: residuals.append(args[0][0]))
    _, logits = eager_contexts(model)
    gamma, beta = weights.final_norm()
    assert beta is None
    x = residuals[0]
    if traits.final_norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    normed = rms_normed(x, gamma, traits.norm_eps)
    ids = torch.arange(traits.vocabulary).expand(len(x), -1)  # [T, V]
    rows = weights.head_rows(ids)  # [T, V, d]
    expected = softcapped(traits.logit_scale * torch.einsum("tvd,td->tv", rows, normed), traits.logit_softcap)
    torch.testing.assert_close(expected, logits, rtol=1e-5, atol=1e-5)


@every_model
def test_dimensions_are_those_of_the_tensors(name: str) -> None:
    model = model_of(name)
    traits, weights = traits_of(model), ModelWeights(model)
    attention = attention_module(decoder_layers(model)[0])
    assert attention.k_proj.weight.shape == (traits.kv_heads * traits.head_dim, traits.width)
    assert weights.output_projection(0)[0].shape == (traits.width, traits.query_heads * traits.head_dim)
    assert len(decoder_layers(model)) == traits.layers
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert traits.tied_head == tied


def test_sliding_layers_stand_outside_the_budget() -> None:
    compactable = {name: traits_of(model_of(name)).compactable_layers for name in CONFIGURATIONS}
    assert compactable["mistral_sliding"] == ()
    assert compactable["qwen2_sliding"] == (0,)
    assert compactable["gemma2"] == compactable["gemma3"] == (1,)
    assert compactable["mistral"] == compactable["qwen2"] == compactable["llama"] == (0, 1)


def test_padding_rows_of_the_head_are_no_vocabulary() -> None:
    assert traits_of(model_of("qwen2"), vocabulary=60).vocabulary == 60
    assert traits_of(model_of("qwen2"), vocabulary=90).vocabulary == 64
