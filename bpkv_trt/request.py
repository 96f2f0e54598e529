"""One run of `bpkv generate`, as everything that can be known before a model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import InputError
from bpkv_trt.input_file import read_file

LARGEST_PROMPT = 64 << 20  # bytes; some 16 million tokens


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """What is asked, and how it is answered."""

    prompt: str
    question: str | None = None  # put after the prompt before it is compacted
    raw: bool = False  # no chat template
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    trace: Path | None = None  # where to write when every range ran


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(PromptRequest):
    """Of a model; `config` says what is kept of the cache and seeds sampling."""

    model: str  # Hugging Face directory or id, GGUF file, or a name of the catalogue such as smollm2
    config: BpkvConfig
    question_after: str | None = None  # asked of the compacted cache
    dtype: str = "auto"  # float32 on a CPU, bfloat16 on a GPU
    device: str = "auto"  # a GPU where there is one
    allow_extrapolation: bool = False  # positions past those the model was trained on
    memory_limit: int | None = None  # bytes; None: what the machine has free
    verify: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineRequest(PromptRequest):
    """Of an engine of TensorRT-LLM."""

    engine: Path  # its folder
    tokenizer: str  # named as a model is
    plugin_lib: Path | None = None  # None: where the plugin's library is looked for
    bounded: bool = False  # memory for what compactions leave alone
    options: Mapping[str, Any] = field(default_factory=dict)  # of BpkvConfig, those that are not as the engine has them


def read_prompt(path: Path, what: str = "prompt file", flag: str = "--prompt-file") -> str:
    """The text of a file; InputError, which names it as `what`, where it cannot be read, is empty or no UTF-8."""
    content = read_file(path, LARGEST_PROMPT, what, flag)
    if b"\0" in content:
        raise InputError(f"The {what} {path} is binary, not text; convert it to UTF-8 text first.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The {what} {path} is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x}); convert it, "
            "for example with iconv -t UTF-8."
        ) from None
    if not text.strip():
        raise InputError(f"The {what} {path} is empty; there is nothing to run a model on.")
    return text
