"""What a session of an engine with BP-KV cannot do, and why: refused by name before anything runs."""

from collections.abc import Mapping
from typing import Any

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError
from bpkv_trt.trtllm.built_engine import EngineLimits

BEAMS = "beams share the blocks of their prompt, and each would evict from the others'"


def refuse_model(model_config: Any, mapping: Any, cuda_graph_mode: bool) -> None:
    """model_config: TensorRT-LLM's ModelConfig; mapping: its Mapping. Raises ConfigError for what is not compacted."""
    if cuda_graph_mode:
        raise _refusal(
            "cuda_graph_mode is on",
            "a graph holds the lengths and blocks of the step that it was captured in",
            "Leave it off",
        )
    if mapping.world_size > 1:
        raise _refusal(
            f"world_size is {mapping.world_size}",
            "ranks would have to agree on what stage 2 reads out, which their sessions do not do yet",
            "Build and run the engine for one GPU, or run it without compaction",
        )
    if not model_config.gpt_attention_plugin or not model_config.remove_input_padding:
        raise _refusal(
            "the engine has no attention plugin with packed tokens",
            "entries are evicted from the pages that it writes",
            "Build it with gpt_attention_plugin and remove_input_padding, which are the defaults",
        )
    if model_config.max_medusa_tokens or model_config.redrafter_num_beams:
        raise _refusal(
            "the engine drafts tokens (Medusa, ReDrafter)",
            "a step of the answer is one token of each sequence",
            "Build it without",
        )
    if model_config.cross_attention:
        raise _refusal("the engine has cross attention", "its cache is not the decoder's own", "Use another model")
    if model_config.gpu_weights_percent < 1:
        raise _refusal(
            f"gpu_weights_percent is {model_config.gpu_weights_percent}", "weight streaming is not covered", "Give 1"
        )


def refuse_setup(given: Mapping[str, Any], limits: EngineLimits, most_rows: int, config: BpkvConfig) -> None:
    """given: arguments of `GenerationSession.setup`. Raises ConfigError for what is not compacted, or is too much.

    most_rows: positions that one run of the engine may score.
    """
    batch, prompt, answer = (given[name] for name in ("batch_size", "max_context_length", "max_new_tokens"))
    if given["beam_width"] != 1:
        raise _refusal(f"beam_width is {given['beam_width']}", BEAMS, "Give 1")
    window = given["max_attention_window_size"]
    if window is not None and _least(window) < prompt + answer:
        raise _refusal(
            f"max_attention_window_size is {_least(window)} and a sequence may have {prompt + answer} tokens",
            "a window is counted in rows of the cache, and written in circles",
            f"Give {prompt + answer} or more, or leave it out",
        )
    if given["sink_token_length"]:
        raise _refusal(
            f"sink_token_length is {given['sink_token_length']}",
            "streaming by place leaves gaps in the pages",
            "Leave it out; BP-KV keeps the first tokens itself (sinks)",
        )
    for name in ("medusa_choices", "lora_manager", "lora_uids", "encoder_max_input_length"):
        if given[name] is not None:
            raise _refusal(f"{name} is given", "the engine's scores are read out without", "Leave it out")
    refuse_size(batch, prompt, answer, limits, most_rows, config)


def refuse_size(batch: int, prompt: int, answer: int, limits: EngineLimits, most_rows: int, config: BpkvConfig) -> None:
    """Raises ConfigError for more sequences, or longer prompts and answers, than the engine was built for.

    prompt, answer: tokens of the longest. most_rows: positions that one run of the engine may score.
    """
    _refuse_too_much("batch_size", batch, limits.max_batch_size)
    _refuse_too_much("max_context_length", prompt, limits.max_input_len)
    _refuse_too_much("max_context_length + max_new_tokens", prompt + answer, limits.max_seq_len)
    rows = batch * min(config.positions, prompt)
    if rows > most_rows:
        raise ConfigError(
            f"The prompts of {batch} sequences have {rows} scoring positions ({config.positions} each), and the engine "
            f"was built for {most_rows} in a run. Run {most_rows // config.positions} sequences at a time, or give "
            "fewer positions."
        )


def refuse_decode(given: Mapping[str, Any], limits: EngineLimits) -> None:
    """given: arguments of `GenerationSession.decode`. Raises ConfigError for what is not compacted, or is too much."""
    refuse_tokens(int(given["context_lengths"].sum()), limits)
    if (beams := given["sampling_config"].num_beams) != 1:
        raise _refusal(f"num_beams is {beams}", BEAMS, "Give 1")
    for name in ("encoder_output", "encoder_input_lengths", "cross_attention_mask"):
        if given[name] is not None:
            raise _refusal(f"{name} is given", "an encoder's cache is not the decoder's own", "Leave it out")


def refuse_tokens(tokens: int, limits: EngineLimits) -> None:
    """Raises ConfigError for prompts of more tokens, all together, than one run of the engine takes."""
    if tokens > (most := limits.max_num_tokens):
        raise ConfigError(
            f"The prompts have {tokens} tokens, and one run of the engine takes {most} (max_num_tokens), which they "
            "share. Nothing was run. Give shorter or fewer prompts, or build an engine for more with --max_num_tokens."
        )


def _refuse_too_much(name: str, value: int, most: int) -> None:
    if value > most:
        raise ConfigError(
            f"{name} is {value}, and the engine was built for at most {most}. Nothing was run. Give less, or build an "
            "engine for more."
        )


def _least(window: Any) -> int:
    return int(min(window)) if isinstance(window, (list, tuple)) else int(window)


def _refusal(what: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"This session cannot compact its KV cache: {what}, and {reason}. {remedy}.")
