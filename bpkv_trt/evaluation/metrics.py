"""What two sequences of next-token distributions have in common."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gap:
    """Predictions of a compacted cache beside the full cache's, over the same n >= 1 tokens."""

    kl: tuple[float, ...]  # KL(full || compacted) in nats, whole vocabulary, by token
    top1: tuple[bool, ...]  # whether both choose the same token

    @property
    def common_prefix(self) -> int:
        """Tokens until the two greedy texts part: up to there both have read the same."""
        return self.top1.index(False) if False in self.top1 else len(self.top1)


def gap_between(full: Tensor, logits: Tensor) -> Gap:
    """full, logits [n, V]: logits, or log-probabilities, of the full and the compacted cache.

    All is done in float64, from the normalisation on: that of fp32 log-probabilities is off by more than a small KL.
    """
    reference, other = (torch.log_softmax(each.double(), dim=-1) for each in (full, logits))
    kl = (reference.exp() * (reference - other)).sum(-1).clamp_min(0)  # no KL is negative, only rounding
    return Gap(tuple(kl.tolist()), tuple((reference.argmax(-1) == other.argmax(-1)).tolist()))
