"""Loading weights so that an incomplete or damaged checkpoint cannot pass for a model."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bpkv_trt.errors import ModelError


@contextlib.contextmanager
def progress_only_on_a_terminal() -> Iterator[None]:
    """Keeps the progress bars of transformers out of logs and pipes."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def checked_weights(name: str, source: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(source, ...)`, then every weight present and finite, else ModelError.

    transformers fills missing weights with random numbers and goes on; such a model only seems to work. Code that
    comes with a checkpoint is never run. What transformers itself raises passes through.
    """
    factory: Any = AutoModelForCausalLM
    with progress_only_on_a_terminal():
        model, report = factory.from_pretrained(
            source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
        )
    absent = sorted(map(str, report["missing_keys"]))
    if absent:
        raise ModelError(
            f"The checkpoint {name!r} lacks {len(absent)} of the model's weights, first {absent[0]}. "
            "Fetch the complete checkpoint."
        )
    for parameter_name, parameter in model.named_parameters():
        if not torch.isfinite(torch.stack(torch.aminmax(parameter))).all():
            raise ModelError(
                f"The weights of {name!r} are damaged: {parameter_name} holds NaN or Inf. Fetch the checkpoint again."
            )
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded
