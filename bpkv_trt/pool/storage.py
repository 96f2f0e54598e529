"""The memory of a pool: keys, values and the logical position of every row."""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOVE_TILE = 1 << 16  # rows gathered at a time: bounds the scratch memory of a compaction

Count = TypeVar("Count", int, NDArray[np.int64])


def pages_of(rows: Count, page_size: int) -> Count:
    """Whole pages that hold so many rows."""
    return -(-rows // page_size)


class RowStorage:
    """Rows in pages; flat row r is row r % page_size of page r // page_size. Everything is addressed by int64 rows."""

    def __init__(
        self, pages: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.keys = torch.empty(pages, page_size, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.positions = torch.full((pages, page_size), -1, dtype=torch.int32, device=device)
        self.key_rows = self.keys.view(-1, head_dim)  # [pages * page_size, D], the same memory
        self.value_rows = self.values.view(-1, head_dim)
        self.position_rows = self.positions.view(-1)

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values in one page."""
        return 2 * self.keys[0].nbytes

    def index(self, rows: NDArray[np.integer]) -> Tensor:
        """Row or page numbers as int64 on the device of the memory."""
        return torch.from_numpy(rows.astype(np.int64)).to(self.keys.device)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Move rows within their heads, K, V and positions alike; both [n], ascending in each head, target <= source.

        Tiles go in ascending order and each is read whole before its first store, so that no unread row is lost.
        """
        for start in range(0, source.numel(), MOVE_TILE):
            loads, stores = source[start : start + MOVE_TILE], target[start : start + MOVE_TILE]
            for rows in (self.key_rows, self.value_rows, self.position_rows):
                rows.index_copy_(0, stores, rows.index_select(0, loads))

    def copy_pages(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy whole pages, K, V and positions alike."""
        loads, stores = self.index(source), self.index(target)
        for pages in (self.keys, self.values, self.positions):
            pages.index_copy_(0, stores, pages.index_select(0, loads))

    def poison(self, rows: NDArray[np.int64]) -> None:
        """Make rows unusable: NaN, at position -1."""
        spoilt = self.index(rows)
        self.key_rows[spoilt] = torch.nan
        self.value_rows[spoilt] = torch.nan
        self.position_rows[spoilt] = -1
