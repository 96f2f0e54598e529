"""The support on which the next-token distribution is followed."""

from typing import NamedTuple

import torch
from torch import Tensor

from bpkv_trt.errors import NumericalError


class TopK(NamedTuple):
    """The K likeliest tokens of every scoring position."""

    ids: Tensor  # [M, K] int64
    p: Tensor  # [M, K] fp32, renormalised over the K
    covered_mass: Tensor  # [M] fp32, what the K hold of the full distribution


def topk_distribution(logits: Tensor, k: int, vocabulary: int) -> TopK:
    """The K likeliest of the first `vocabulary` ids; logits [M, V], V >= vocabulary, any dtype.

    Rows of the head beyond the vocabulary are padding and stand outside the distribution; K is clamped to the
    vocabulary. Raises NumericalError where a logit is NaN or infinite.
    """
    real = logits[:, :vocabulary].float()
    if not bool(torch.isfinite(real).all()):
        raise NumericalError(
            "The model's logits contain NaN or infinite values, so its next-token distribution cannot be followed and "
            "nothing was evicted. Check the weights for corruption, or load the model in float32 or bfloat16 instead "
            "of float16."
        )
    top, ids = real.topk(min(k, vocabulary), dim=-1)
    covered = (torch.logsumexp(top, -1) - torch.logsumexp(real, -1)).exp().clamp_(max=1.0)
    return TopK(ids, torch.softmax(top, -1), covered)
