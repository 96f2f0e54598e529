"""How the attention that entries receive is carried from query to query."""

from dataclasses import dataclass

import torch
from torch import Tensor

NEGLIGIBLE = 2.0**-40  # a weight too small to change an fp32 sum of attention weights


@dataclass(frozen=True)
class RunningAttention:
    """A running score s of every entry, from the attention a_t (mean over the group) that query t pays it.

    Without `decay` the undivided sum: s <- s + a_t. With it an exponential moving average: s <- decay s + (1 - decay)
    a_t. All queries of a prompt count; of the decode steps after it only every `every`-th does, for all the steps since
    the last (its decay is decay^every), and none after the first `steps`.
    """

    decay: float | None = None
    every: int = 1
    steps: int | None = None

    def contributions(self, count: int, decoded: int | None) -> tuple[float, Tensor]:
        """How `count` further queries enter the score: s <- carry s + sum_i weight_i a_i; returns carry, weights.

        decoded: decode steps taken before them, None within a prompt. weights: [count] float64, 0 where a query does
        not count. One call of n queries is n calls of one.
        """
        counts = torch.ones(count, dtype=torch.bool)
        if decoded is not None:
            step = torch.arange(decoded + 1, decoded + count + 1)
            counts = step % self.every == 0
            if self.steps is not None:
                counts &= step <= self.steps
        if self.decay is None:
            return 1.0, counts.double()
        kept = self.decay if decoded is None else self.decay**self.every
        later = counts.sum() - counts.cumsum(0)
        weights = torch.where(counts, (1 - kept) * kept ** later.double(), 0.0)
        return kept ** int(counts.sum()), weights
