"""Where the parts of a supported model are: the one place that knows transformers' module names."""

from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, in order."""
    return cast(nn.ModuleList, model.get_submodule("model.layers"))


def attention_module(layer: nn.Module) -> nn.Module:
    """The self-attention of a decoder layer."""
    return layer.get_submodule("self_attn")


def output_projection_module(layer: nn.Module) -> nn.Linear:
    """W_O of a decoder layer."""
    return cast(nn.Linear, layer.get_submodule("self_attn.o_proj"))


def final_norm_module(model: PreTrainedModel) -> nn.Module:
    """The norm between the last residual and the output head."""
    return model.get_submodule("model.norm")


def rotary(model: PreTrainedModel) -> nn.Module:
    """The rotary embedding, shared by all layers (Gemma 3 keeps two sets of frequencies in it)."""
    return model.get_submodule("model.rotary_emb")


def inverse_frequencies(model: PreTrainedModel, layer: int) -> Tensor:
    """[D / 2] fp32 angles by which one position turns each pair of a layer's query; Gemma 3's windows have their own.

    Read from the rotary module's buffers: its cosines are rounded to the model's type.
    """
    kinds = getattr(model.config, "layer_types", None)
    kind = None if kinds is None else kinds[layer]
    local = getattr(model.get_submodule("model"), "rotary_emb_local", None)  # transformers 4
    module = local if local is not None and kind == "sliding_attention" else rotary(model)
    by_kind = getattr(module, f"{kind}_inv_freq", None)  # transformers 5
    return cast(Tensor, module.inv_freq if by_kind is None else by_kind).float()


def rope_can_be_undone(model: PreTrainedModel) -> bool:
    """Whether RoPE is a plain rotation of a head's halves: Cohere turns neighbours, YaRN scales as well."""
    scales = [value for name, value in vars(rotary(model)).items() if name.endswith("attention_scaling")]
    return str(model.config.model_type) != "cohere" and all(scale == 1.0 for scale in scales)


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The output head; its weight is the embedding's where they are tied."""
    return cast(nn.Linear, model.get_output_embeddings())  # type: ignore[no-untyped-call]
