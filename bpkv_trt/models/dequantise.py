"""From a GGUF file to an ordinary Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bpkv_trt.errors import ModelError
from bpkv_trt.models.checked_weights import checked_weights, progress_only_on_a_terminal
from bpkv_trt.models.failure import told
from bpkv_trt.models.gguf_file import GgufMetadata
from bpkv_trt.models.gguf_tokenizer import rebuild_tokenizer


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


def _read(source: Path, name: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    try:
        tokenizer = rebuild_tokenizer(GgufMetadata(source))
        options = {"gguf_file": source.name, **_dense()}
        return tokenizer, checked_weights(name, str(source.parent), torch.float32, **options)
    except ModelError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in the parsers of gguf and transformers
        raise ModelError(
            f"The GGUF file of {name!r} ({source.name}) cannot be read ({told(error)}). "
            "It is truncated, damaged, or of a kind that this transformers cannot load; fetch it again."
        ) from error


def _dense() -> dict[str, Any]:
    """Newer releases of transformers 5 leave GGUF weights packed, which cannot be saved, unless told otherwise."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
