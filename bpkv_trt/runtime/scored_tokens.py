"""Which tokens of a run of an engine are scoring positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredTokens:
    """S scoring rows among the packed tokens of B sequences, the last ones of each; S may be 0."""

    rows: tuple[int, ...]  # [S] ascending
    counts: tuple[int, ...]  # [B]
    weights: tuple[float, ...]  # [S] the share of each position in the compaction that it is for

    @classmethod
    def last_of(cls, tokens: Sequence[int], scored: Sequence[tuple[int, int]]) -> "ScoredTokens":
        """By sequence: how many tokens it has in the run; how many of these, the last, are scored, and of how many
        positions in all, those of other runs included."""
        ends = list(accumulate(tokens))
        rows = tuple(row for end, (count, _) in zip(ends, scored, strict=True) for row in range(end - count, end))
        weights = tuple(1 / total for count, total in scored for _ in range(count))
        return cls(rows, tuple(count for count, _ in scored), weights)

    @property
    def offsets(self) -> tuple[int, ...]:
        """[B + 1]: rows offsets[b] .. offsets[b + 1] are those of sequence b."""
        return (0, *accumulate(self.counts))

    def span(self, sequence: int) -> slice:
        """The rows of the b-th sequence."""
        return slice(*self.offsets[sequence : sequence + 2])

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """By the engine's names, on its device."""
        return {
            "bpkv_score_rows": torch.tensor(self.rows, dtype=torch.int32, device=device),
            "bpkv_score_offsets": torch.tensor(self.offsets, dtype=torch.int32, device=device),
            "bpkv_score_weights": torch.tensor(self.weights, dtype=torch.float32, device=device),
        }
