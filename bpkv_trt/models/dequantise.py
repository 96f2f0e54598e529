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


@contextlib.contextmanager
def progress_only_on_a_terminal() -> Iterator[None]:
    """Keeps the progress bars of transformers out of logs and pipes."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def dequantise(source: Path, folder: Path, name: str) -> None:
    """Write weights, configuration and tokenizer of the GGUF file `source` into `folder`.

    Weights are stored in float32: a Q4_1 weight is the product of two halves plus a third, which neither bf16 nor
    fp16 holds, and the cached values must equal what transformers dequantises.
    """
    try:
        metadata = GgufMetadata(source)
        tokenizer = rebuild_tokenizer(metadata)
        model = _load(source)
    except ModelError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in the parsers of gguf and transformers
        raise ModelError(
            f"The GGUF file of {name!r} ({source.name}) cannot be read: {type(error).__name__}: {error}. "
            "It is truncated, damaged, or of a kind that this transformers cannot load; fetch it again."
        ) from error
    with progress_only_on_a_terminal():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load(source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with progress_only_on_a_terminal():
        model, report = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, output_loading_info=True
        )
    if report["missing_keys"]:
        raise ModelError(f"The GGUF file {source.name} lacks weights, first {sorted(report['missing_keys'])[0]}.")
    return model
