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
    """full [n, V] log-probabilities, logits [n, V] of the compacted cache; the sums are taken in float64."""
    reference, other = full.double(), torch.log_softmax(logits.double(), dim=-1)
    kl = (reference.exp() * (reference - other)).sum(-1)
    return Gap(tuple(kl.tolist()), tuple((reference.argmax(-1) == other.argmax(-1)).tolist()))
