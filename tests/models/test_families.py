"""What is not covered is refused by name, and never approximated."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    PretrainedConfig,
    T5Config,
)

from bpkv_trt.errors import ModelError
from bpkv_trt.models.families import FAMILIES, TRANSFORMERS_MAJOR, UNCOVERED, family_of
from bpkv_trt.models.traits_of import traits_of
from tests.models.small_models import SIZES, configurations, random_model


def test_every_covered_family_has_a_small_model_that_is_tested() -> None:
    assert {config.model_type for config in configurations().values()} == set(FAMILIES)
    assert not set(FAMILIES) & set(UNCOVERED)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (MixtralConfig(), "'mixtral'.*mixture-of-experts"),
        (MambaConfig(), "'mamba'.*no KV entries"),
        (T5Config(), "'t5'.*encoder-decoder"),
        (GPT2Config(), "'gpt2'.*absolute positions"),
        (PretrainedConfig(), "no traits are known"),
    ],
)
def test_uncovered_architectures_are_refused_by_name(config: PretrainedConfig, missing: str) -> None:
    with pytest.raises(ModelError, match=missing) as caught:
        family_of(config)
    assert "Supported are cohere" in str(caught.value)


@pytest.mark.parametrize(
    "switch",
    [
        {"partial_rotary_factor": 0.5},
        {"attention_chunk_size": 64},
        {"pretraining_tp": 2},
        {"alibi": True},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
    ],
)
def test_switches_that_change_the_formulas_are_refused(switch: dict[str, Any]) -> None:
    config = LlamaConfig(**SIZES)
    for name, value in switch.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=next(iter(switch))):
        family_of(config)


@pytest.mark.parametrize("switch", [{"use_bidirectional_attention": True}, {"attn_logit_softcapping": 50.0}])
def test_switches_of_gemma_3_that_its_forward_would_not_honour_causally(switch: dict[str, Any]) -> None:
    config = Gemma3TextConfig(**SIZES, head_dim=16)
    for name, value in switch.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=next(iter(switch))):
        family_of(config)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_changes_with_length_is_refused(rope_type: str) -> None:
    config = LlamaConfig(**SIZES)
    config.rope_scaling = {"rope_type": rope_type, "factor": 2.0}
    with pytest.raises(ModelError, match=rope_type):
        family_of(config)


def test_rope_settings_of_transformers_5_are_honoured_or_refused() -> None:
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    if TRANSFORMERS_MAJOR >= 5:
        assert family_of(config) is FAMILIES["llama"]
    else:  # transformers 4 would read them without a word and rotate by its default
        with pytest.raises(ModelError, match="written by transformers 5"):
            family_of(config)


class OtherLlama(LlamaForCausalLM):
    pass


def test_a_class_of_its_own_is_not_taken_for_the_family() -> None:
    model = OtherLlama(LlamaConfig(**SIZES))
    with pytest.raises(ModelError, match="OtherLlama"):
        traits_of(model)


def test_quantised_projections_are_refused() -> None:
    model = random_model(LlamaConfig(**SIZES))

    class Quantised(torch.nn.Linear):
        pass

    model.model.layers[1].self_attn.o_proj = Quantised(32, 32)
    with pytest.raises(ModelError, match="Quantised"):
        traits_of(model)


def test_layers_that_scale_differently_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.model.layers[1].self_attn.scaling = 0.9
    with pytest.raises(ModelError, match="scale"):
        traits_of(model)
