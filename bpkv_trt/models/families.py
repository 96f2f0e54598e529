"""Which architectures are covered, and what is missing for others: one entry each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformers import PretrainedConfig
from transformers import __version__ as transformers_version

from bpkv_trt.core.traits import FinalNorm
from bpkv_trt.errors import ModelError


@dataclass(frozen=True)
class Family:
    """The terms that all models of one `model_type` share.

    `fixed` names configuration switches together with the only values under which the entry is right; a switch that
    the configuration lacks counts as unset (None).
    """

    model_class: str
    final_norm: FinalNorm = "rms"
    norm_offset: float = 0.0  # an RMSNorm multiplies by norm_offset + weight
    qk_norm: bool = False
    post_attention_norm: str | None = None  # the module between o_proj and the residual add
    parallel_block: bool = False
    attention_softcap: bool = False  # whether the forward applies config.attn_logit_softcapping
    always_bos: bool = False  # text that does not begin with BOS is out of the training distribution
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({}))


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    norm_offset=1.0,
    post_attention_norm="post_attention_layernorm",
    attention_softcap=True,
    always_bos=True,
    fixed={"use_bidirectional_attention": (None, False)},
)
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "gemma2": GEMMA2,
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        norm_offset=1.0,
        qk_norm=True,
        post_attention_norm="post_attention_layernorm",
        always_bos=True,
        # The forward ignores attn_logit_softcapping, so a checkpoint that sets it expects another implementation.
        fixed={"use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,)},
    ),
    "cohere": Family("CohereForCausalLM", final_norm="layer", parallel_block=True),
    "granite": Family("GraniteForCausalLM"),
}

# Switches that change attention, rotation or the residual path in any family.
COMMON_SWITCHES: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_pct": (None, 1, 1.0),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "num_kv_shared_layers": (None, 0),
    "quantization_config": (None,),
}
TRANSFORMERS_MAJOR = int(transformers_version.partition(".")[0])
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Of these the inverse frequencies depend on the length of the sequence, so cached keys and later requests would change.
CHANGING_ROPE = {"dynamic", "longrope"}

MIXTURE = "mixture-of-experts routing has not been checked against masked forwards"
LATENT = "latent attention (MLA) caches no K and V rows per head"
RECURRENT = "recurrent or state-space layers have no KV entries to evict"
ENCODER_DECODER = "encoder-decoder models with cross attention are not covered"
IMAGES = "only text models are covered: save its language model as a model of its own"
UNCOVERED: dict[str, str] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "gpt_oss": "sink logits in the softmax denominator, and " + MIXTURE,
    "mixtral": MIXTURE,
    "qwen2_moe": MIXTURE,
    "qwen3_moe": MIXTURE,
    "granitemoe": MIXTURE,
    "olmoe": MIXTURE,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "falcon_mamba": RECURRENT,
    "jamba": RECURRENT,
    "bamba": RECURRENT,
    "rwkv": RECURRENT,
    "recurrent_gemma": RECURRENT,
    "qwen3_next": RECURRENT,
    "t5": ENCODER_DECODER,
    "bart": ENCODER_DECODER,
    "whisper": ENCODER_DECODER,
    "gemma3": IMAGES,
    "llava": IMAGES,
    "mllama": IMAGES,
    "qwen2_vl": IMAGES,
    "qwen2_5_vl": IMAGES,
    "gemma3n": "KV layers shared between layers and per-layer inputs",
    "llama4_text": "chunked attention and layers without RoPE",
    "cohere2": "layers without RoPE",
    "smollm3": "layers without RoPE",
    "gpt2": "learned absolute positions and fused projections",
    "gpt_neox": "partial rotary embeddings and fused projections",
    "phi": "partial rotary embeddings and an output head with bias",
    "phi3": "fused projections and length-dependent RoPE",
    "falcon": "ALiBi or fused projections",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "opt": "learned absolute positions",
    "olmo2": "norms over the whole query and key width",
    "glm4": "partial rotary embeddings",
    "stablelm": "partial rotary embeddings",
}


def family_of(config: PretrainedConfig) -> Family:
    """The entry for a model's configuration.

    ModelError, naming what is missing, for an architecture without an entry and for a covered one with a switch that
    the entry does not cover. Nothing is approximated.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        reason = UNCOVERED.get(kind, f"no traits are known for the architecture {kind!r}")
        raise ModelError(
            f"Models of type {kind!r} are not supported: {reason}. "
            f"Supported are {', '.join(sorted(FAMILIES))}; nothing is approximated in silence."
        )
    family = FAMILIES[kind]
    for switch, covered in (COMMON_SWITCHES | dict(family.fixed)).items():
        value = getattr(config, switch, None)
        if value not in covered:
            raise ModelError(_uncovered(kind, f"{switch}={value!r}"))
    _check_rope(config)
    strange = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if strange:
        raise ModelError(_uncovered(kind, f"layer_types with {', '.join(sorted(strange))}"))
    return family


def _uncovered(kind: str, what: str) -> str:
    return (
        f"This {kind!r} model sets {what} in its configuration, which the scoring formulas do not cover, "
        "so it is refused and not approximated. Use a checkpoint without it."
    )


def _check_rope(config: PretrainedConfig) -> None:
    """RoPE settings of either transformers generation: `rope_parameters` (5) or `rope_scaling` (4)."""
    parameters = getattr(config, "rope_parameters", None)
    scaling = getattr(config, "rope_scaling", None)
    if parameters is not None and TRANSFORMERS_MAJOR < 5:
        raise ModelError(
            "The model's configuration was written by transformers 5 (rope_parameters), and the installed transformers "
            "4 would silently ignore its RoPE settings. Install transformers 5, or save the model with transformers 4."
        )
    for settings in _rope_settings(parameters) + _rope_settings(scaling):
        rope_type = settings.get("rope_type", settings.get("type", "default"))
        if rope_type in CHANGING_ROPE:
            raise ModelError(_uncovered(config.model_type, f"RoPE of type {rope_type!r}"))
        if settings.get("partial_rotary_factor", 1) not in (None, 1, 1.0):
            raise ModelError(
                _uncovered(config.model_type, f"partial_rotary_factor={settings['partial_rotary_factor']!r}")
            )


def _rope_settings(value: Any) -> list[dict[str, Any]]:
    """One flat dictionary, or (Gemma 3) one for each layer type."""
    if not isinstance(value, dict):
        return []
    nested = [inner for inner in value.values() if isinstance(inner, dict)]
    return nested or [value]
