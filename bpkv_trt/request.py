"""One run of `bpkv generate`, as everything that can be known before a model is loaded."""

from dataclasses import dataclass
from pathlib import Path

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import InputError
from bpkv_trt.input_file import read_file

LARGEST_PROMPT = 64 << 20  # bytes; some 16 million tokens


@dataclass(frozen=True)
class GenerateRequest:
    """What to run and how; `config` says what is kept of the cache and seeds sampling."""

    model: str  # Hugging Face directory or id, GGUF file, or a name of the catalogue such as smollm2
    prompt: str
    config: BpkvConfig
    question: str | None = None  # put after the prompt before it is compacted
    question_after: str | None = None  # asked of the compacted cache
    raw: bool = False  # no chat template
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    dtype: str = "auto"  # float32 on a CPU, bfloat16 on a GPU
    device: str = "auto"  # a GPU where there is one
    allow_extrapolation: bool = False  # positions past those the model was trained on
    memory_limit: int | None = None  # bytes; None: what the machine has free
    verify: bool = False
    trace: Path | None = None  # where to write what the run's trace recorded


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
