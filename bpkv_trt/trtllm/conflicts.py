"""Options of `trtllm-build` that an engine with BP-KV in it cannot have."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bpkv_trt.errors import ConfigError, InputError
from bpkv_trt.input_file import read_file

LARGEST = 1 << 24  # bytes of a build configuration
_DRAFTS = "a step of the answer is one token of each sequence, and drafted ones are more"
_PAGES = "entries are evicted from pages of the paged KV cache"
_ADAPTERS = "scores are read out through the checkpoint's own output projections, without adapters; merge them into it"
_PLUGINS = "BP-KV is put into the network through these two options itself"


def _text(value: object) -> str:
    """As a command line spells it; enumerations by their name."""
    return str(getattr(value, "name", value)).lower()


def _given(value: object) -> bool:
    return value is not None


def _on(value: object) -> bool:
    return _text(value) not in ("false", "disable", "none")


def _off(value: object) -> bool:
    return _text(value) in ("false", "disable")


def _many(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _some(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _not_paged(value: object) -> bool:
    return value is not None and _text(value).rpartition(".")[2] != "paged"


# Option, when it is refused, and why.
CONFLICTS: Mapping[str, tuple[Callable[[object], bool], str]] = MappingProxyType(
    {
        "model_cls_file": (_given, _PLUGINS),
        "model_cls_name": (_given, _PLUGINS),
        "max_beam_width": (_many, "beams share the blocks of their prompt, and each would evict from the others'"),
        "speculative_decoding_mode": (lambda value: isinstance(value, str) and _on(value), _DRAFTS),
        "max_draft_len": (_some, _DRAFTS),
        "multiple_profiles": (_on, "TensorRT-LLM's Python runtime, which compacts, takes no more than two profiles"),
        "streamingllm": (_on, "TensorRT-LLM no longer has it, and what it evicts goes by place alone"),
        "kv_cache_type": (_not_paged, _PAGES),
        "paged_kv_cache": (_off, _PAGES),
        "remove_input_padding": (_off, "scoring positions are picked from packed tokens"),
        "gpt_attention_plugin": (lambda value: value is None or _off(value), "it is what writes the paged KV cache"),
        "reduce_fusion": (_on, "it leaves no residual stream to read scores out from"),
        "user_buffer": (_on, "it leaves no residual stream to read scores out from"),
        "norm_quant_fusion": (_on, "it leaves no residual stream to read scores out from"),
        "fuse_fp4_quant": (_on, "the attention's output, which is scored, would be FP4"),
        "lora_plugin": (_on, _ADAPTERS),
        "lora_dir": (_given, _ADAPTERS),
        "strip_plan": (_on, "refitting an engine knows nothing of the weights that scores are read out with"),
        "use_strip_plan": (_on, "refitting an engine knows nothing of the weights that scores are read out with"),
    }
)


def refuse_conflicts(options: Mapping[str, Any]) -> None:
    """options: of the stock command, parsed, with what it reads from the file of `--build_config`.

    Raises ConfigError for the first one that an engine with BP-KV cannot have, InputError where that file is no JSON.
    """
    _refuse(options, "")
    if (path := options.get("build_config")) is not None:
        try:
            content = json.loads(read_file(Path(path), LARGEST, "build configuration", "--build_config"))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise InputError(f"The build configuration {path} is no JSON object; correct the file.")
        _refuse(content, f" in {path}")


def _refuse(options: Mapping[str, Any], where: str) -> None:
    for name, (refused, reason) in CONFLICTS.items():
        if name in options and refused(options[name]):
            shown = name if where else f"--{name}"
            raise ConfigError(
                f"{shown} is {_text(options[name])}{where}, which cannot be combined with --plugin bpkv: {reason}. "
                "Leave it out, or build without the plugin."
            )
