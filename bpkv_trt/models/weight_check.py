"""Whether a checkpoint gave a model all of its weights, and sane ones."""

from typing import Any

import torch
from transformers import PreTrainedModel

from bpkv_trt.errors import ModelError


def check_weights(model: PreTrainedModel, report: dict[str, Any], name: str) -> None:
    """ModelError if the loading `report` of transformers names missing weights, or any weight is NaN or Inf.

    transformers fills missing weights with random numbers and goes on; such a model only seems to work.
    """
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
