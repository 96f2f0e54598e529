"""From a GGUF file to an ordinary Hugging Face folder."""

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bpkv_trt.errors import ModelError
from bpkv_trt.models.gguf_file import GgufMetadata
from bpkv_trt.models.gguf_tokenizer import rebuild_tokenizer
from bpkv_trt.models.weight_check import check_weights


@contextlib.contextmanager
def progress_only_on_a_terminal() -> Iterator[None]:
    """Keeps the progress bars of transformers out of logs and pipes."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def dequantise(source: Path, folder: Path, name: str) -> None:
    """Write weights, configuration and tokenizer of the GGUF file `source` into `folder`.

    Weights are stored in float32: a Q4_1 weight is the product of two halves plus a third, which neither bf16 nor
    fp16 holds, and the cached values must equal what transformers dequantises. ModelError if the file is damaged or
    incomplete, OSError if the folder cannot be written.
    """
    tokenizer, model = _read(source, name)
    try:
        with progress_only_on_a_terminal():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # safetensors and tokenizers report a full disk by exceptions of their own
        raise OSError(f"{source.name} could not be dequantised into it: {error}") from error


def _read(source: Path, name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    try:
        tokenizer = rebuild_tokenizer(GgufMetadata(source))
        with progress_only_on_a_terminal():
            model, report = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32, output_loading_info=True
            )
    except ModelError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in the parsers of gguf and transformers
        detail = " ".join(str(error).split())
        raise ModelError(
            f"The GGUF file of {name!r} ({source.name}) cannot be read ({type(error).__name__}: {detail:.300}). "
            "It is truncated, damaged, or of a kind that this transformers cannot load; fetch it again."
        ) from error
    check_weights(model, report, name)
    return tokenizer, model
