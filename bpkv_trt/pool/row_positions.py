"""Which token of a sequence every row is, where all heads of a pool hold equally many rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RowPositions:
    """Those tokens that the last compaction kept, in every head its own, and then all that have come since.

    So a token that comes costs nothing, and an uncompacted sequence needs no table.
    """

    kept: list[Tensor]  # by pool, [layers, Hkv, n] int32 logical positions, ascending
    compacted_at: int = 0  # logical length when these were kept
    logical_length: int = 0

    @classmethod
    def empty(cls, shapes: Sequence[tuple[int, int]], device: torch.device) -> "RowPositions":
        """Of a sequence without tokens, in pools of (layers, KV heads)."""
        return cls([torch.empty(*shape, 0, dtype=torch.int32, device=device) for shape in shapes])

    def extend(self, count: int) -> None:
        """So many further tokens have come, a row in every head."""
        self.logical_length += count

    def rows(self, pool: int) -> int:
        """Rows that every head of a pool holds."""
        return self.kept[pool].shape[2] + self.logical_length - self.compacted_at

    def head(self, pool: int, layer: int, head: int) -> Tensor:
        """[n] int32 of one head, ascending; `layer` is counted within the pool."""
        kept = self.kept[pool][layer, head]
        return torch.cat([kept, self._since(kept.device)])

    def keep(self, rows: Sequence[Tensor]) -> None:
        """Only these rows stay, by pool [layers, Hkv, n] int64, ascending."""
        self.kept = [self._table(pool).gather(2, stays) for pool, stays in enumerate(rows)]
        self.compacted_at = self.logical_length

    def _table(self, pool: int) -> Tensor:
        kept = self.kept[pool]
        return torch.cat([kept, self._since(kept.device).expand(*kept.shape[:2], -1)], dim=2)

    def _since(self, device: torch.device) -> Tensor:
        return torch.arange(self.compacted_at, self.logical_length, dtype=torch.int32, device=device)
