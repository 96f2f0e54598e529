"""Loading weights so that an incomplete, foreign or damaged checkpoint cannot pass for a model."""

import contextlib
import io
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bpkv_trt.errors import ModelError

DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rope\.freqs)$")  # old checkpoints hold what a configuration implies


@contextlib.contextmanager
def progress_only_on_a_terminal() -> Iterator[None]:
    """Keeps the progress bars of transformers out of logs and pipes."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _without_load_report() -> Iterator[None]:
    """Keeps the table of transformers off stderr: what is wrong in it is said by `_refuse_misfit`."""
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_is_error)  # not its level: transformers says more where that is set
    try:
        yield
    finally:
        log.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def checked_weights(name: str, source: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(source, ...)`, then every weight in its place and finite, else ModelError.

    transformers fills missing weights with random numbers, leaves out those it has no place for, and goes on; such a
    model only seems to work. Code that comes with a checkpoint is never run. What transformers itself raises passes
    through.
    """
    factory: Any = AutoModelForCausalLM
    with progress_only_on_a_terminal(), _without_load_report():
        model, report = factory.from_pretrained(
            source,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name and shape
            trust_remote_code=False,
            **options,
        )
    _refuse_misfit(name, report)
    for parameter_name, parameter in model.named_parameters():
        if not torch.isfinite(torch.stack(torch.aminmax(parameter))).all():
            raise ModelError(
                f"The weights of {name!r} are damaged: {parameter_name} holds NaN or Inf. Fetch the checkpoint again."
            )
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _refuse_misfit(name: str, report: Mapping[str, Any]) -> None:
    """ModelError where the weights are not those of the model that the configuration describes."""
    misshapen = sorted(report["mismatched_keys"])
    if misshapen:
        weight, found, wanted = misshapen[0]
        raise ModelError(
            f"The configuration of {name!r} does not fit its weights: {len(misshapen)} of them have another shape, "
            f"first {weight}, which is {tuple(found)} and should be {tuple(wanted)}. Fetch both from the same place."
        )
    absent = sorted(report["missing_keys"])
    if absent:
        raise ModelError(
            f"The checkpoint {name!r} lacks {len(absent)} of the model's weights, first {absent[0]}. "
            "Fetch the complete checkpoint."
        )
    surplus = sorted(key for key in report["unexpected_keys"] if not DERIVED.search(key))
    if surplus:
        raise ModelError(
            f"The configuration of {name!r} has no place for {len(surplus)} of the checkpoint's weights, first "
            f"{surplus[0]}: the model would run without them. Fetch both from the same place."
        )
