"""From a transformers model to the architecture terms that scoring needs."""

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ModelError
from bpkv_trt.models.families import Family, family_of
from bpkv_trt.models.modules import (
    attention_module,
    decoder_layers,
    final_norm_module,
    output_head,
    output_projection_module,
)


def traits_of(model: PreTrainedModel, vocabulary: int | None = None) -> ModelTraits:
    """The traits of a supported model, read from its configuration and its modules.

    `vocabulary` is the number of ids the tokenizer knows, where that is less than the head has rows. ModelError names
    what is missing for everything that is not covered.
    """
    config = model.config
    family = family_of(config)
    _check_class(model, family)
    attentions = [attention_module(layer) for layer in decoder_layers(model)]
    _check_projections(model)
    sliding = _sliding_layers(config)
    norm: Any = final_norm_module(model)
    rows: int = output_head(model).weight.shape[0]
    return ModelTraits(
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=int(getattr(attentions[0], "head_dim")),  # noqa: B009 (a Module attribute is typed Tensor | Module)
        width=config.hidden_size,
        vocabulary=rows if vocabulary is None else min(rows, vocabulary),
        attention_scale=_attention_scale(attentions),
        final_norm=family.final_norm,
        norm_eps=float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))),
        attention_softcap=config.attn_logit_softcapping if family.attention_softcap else None,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
        residual_multiplier=getattr(config, "residual_multiplier", None) or 1.0,
        post_attention_norm=family.post_attention_norm is not None,
        qk_norm=family.qk_norm or bool(getattr(config, "use_qk_norm", False)),
        tied_head=output_head(model).weight is model.get_input_embeddings().weight,
        parallel_block=family.parallel_block,
        sliding_window=config.sliding_window if sliding else None,
        sliding_layers=sliding,
        max_positions=config.max_position_embeddings,
    )


def _check_class(model: PreTrainedModel, family: Family) -> None:
    """A subclass or a class from a repository's own code may compute something else under the same model_type."""
    kind = type(model)
    if kind.__name__ != family.model_class or not kind.__module__.startswith("transformers.models."):
        raise ModelError(
            f"Models of type {model.config.model_type!r} are covered as transformers' {family.model_class}; this one "
            f"is a {kind.__module__}.{kind.__name__}, whose forward pass is not known. Load it as the former."
        )


def _check_projections(model: PreTrainedModel) -> None:
    heads = [output_projection_module(layer) for layer in decoder_layers(model)] + [output_head(model)]
    for module in heads:
        if type(module) is not nn.Linear:
            raise ModelError(
                f"The readout needs plain output projections and finds a {type(module).__name__} (quantised or adapted "
                "weights). Load the model without quantisation, and merge adapters first."
            )
    if output_head(model).bias is not None:
        raise ModelError("The output head has a bias, which no covered architecture has; this model is not supported.")


def _attention_scale(attentions: list[nn.Module]) -> float:
    scales = {float(getattr(attention, "scaling")) for attention in attentions}  # noqa: B009 (as above)
    if len(scales) != 1:
        raise ModelError(f"The layers scale their attention differently ({sorted(scales)}); this is not supported.")
    return scales.pop()


def _sliding_layers(config: PretrainedConfig) -> frozenset[int]:
    """Layers that attend to a window only; Mistral has no list of layer types and slides in all layers or none."""
    if getattr(config, "sliding_window", None) is None:
        return frozenset()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return frozenset(range(config.num_hidden_layers)) if config.model_type == "mistral" else frozenset()
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
