"""Host-side bookkeeping: which pages every head owns, how many rows they hold, and where a row lies."""

import numpy as np
from numpy.typing import NDArray

from bpkv_trt.pool.allocator import PageAllocator


class PageTable:
    """Page table, physical lengths and logical lengths of all sequences of a pool, by slot.

    A sequence handle is a counter value that is never given out again; its slot is reused. "Head" numbers a head of
    the whole model here: layer * Hkv + KV head.
    """

    def __init__(self, layers: int, kv_heads: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = np.full((4, layers, kv_heads, 8), -1, dtype=np.int32)  # [slot, L, Hkv, P], -1: none
        self.lengths = np.zeros((4, layers, kv_heads), dtype=np.int32)  # [slot, L, Hkv] rows held
        self.logical = np.zeros(4, dtype=np.int64)  # [slot] tokens seen, never shrinks
        self.slots: dict[int, int] = {}
        self._next_handle = 0

    def add(self) -> int:
        """Open a slot; returns the new sequence handle."""
        occupied = set(self.slots.values())
        slot = next(slot for slot in range(len(occupied) + 1) if slot not in occupied)
        if slot == len(self.logical):
            self.pages = np.concatenate([self.pages, np.full_like(self.pages, -1)])
            self.lengths = np.concatenate([self.lengths, np.zeros_like(self.lengths)])
            self.logical = np.concatenate([self.logical, np.zeros_like(self.logical)])
        handle = self._next_handle
        self._next_handle += 1
        self.slots[handle] = slot
        return handle

    def remove(self, sequence: int) -> None:
        """Close a sequence's slot. Its pages are the caller's to free."""
        slot = self.slots.pop(sequence)
        self.pages[slot], self.lengths[slot], self.logical[slot] = -1, 0, 0

    def owned(self, slot: int) -> NDArray[np.int32]:
        """[n] every page of a slot, by layer, head and place in the head."""
        pages: NDArray[np.int32] = self.pages[slot]
        return pages[pages >= 0]

    def page_counts(self, slot: int) -> NDArray[np.int64]:
        """[L, Hkv] pages that every head owns."""
        counts: NDArray[np.int64] = np.count_nonzero(self.pages[slot] >= 0, axis=-1)
        return counts

    def grow(self, slot: int, needed: NDArray[np.int64], spacing: int, allocator: PageAllocator) -> None:
        """Take `needed` [L, Hkv] further pages; heads of an empty layer lie `spacing` pages apart where possible."""
        owned = self.page_counts(slot)
        self._widen(int((owned + needed).max()))
        for layer in np.flatnonzero(needed.any(axis=1)).tolist():
            table = self.pages[slot, layer]  # [Hkv, P]
            if not owned[layer].any():
                for head, pages in enumerate(allocator.place(needed[layer], spacing)):
                    table[head, : pages.size] = pages
                continue
            for head in np.flatnonzero(needed[layer]).tolist():
                first, count = int(owned[layer, head]), int(needed[layer, head])
                last = int(table[head, first - 1]) if first else None
                table[head, first : first + count] = allocator.grow(last, count)

    def truncate(self, slot: int, kept: NDArray[np.int64]) -> NDArray[np.int32]:
        """Strike every page of a slot past the first `kept` [L, Hkv] of its head; returns those struck."""
        pages: NDArray[np.int32] = self.pages[slot]
        tail = (np.arange(pages.shape[-1]) >= kept[..., None]) & (pages >= 0)
        struck: NDArray[np.int32] = pages[tail]
        pages[tail] = -1
        return struck

    def shift(self, slot: int, layer: int, kv_head: int, count: int) -> NDArray[np.int32]:
        """Strike the first `count` pages of a head and the rows they hold; returns the pages struck."""
        pages: NDArray[np.int32] = self.pages[slot, layer, kv_head]
        struck: NDArray[np.int32] = pages[:count].copy()
        pages[:] = np.concatenate([pages[count:], np.full(count, -1, dtype=np.int32)])
        self.lengths[slot, layer, kv_head] -= count * self.page_size
        return struck

    def locate(
        self, slot: int, head: NDArray[np.int64] | int, rows: NDArray[np.int64] | NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Flat row of the pool's memory for row `rows` of head `head`, broadcast against each other.

        int64: flat row x head_dim passes 2^31 in a pool of ordinary size.
        """
        tables = self.pages[slot].reshape(-1, self.pages.shape[-1])  # [L * Hkv, P]
        pages: NDArray[np.int64] = tables[head, rows // self.page_size].astype(np.int64)
        return pages * self.page_size + rows % self.page_size

    def last_rows(self, slot: int, count: int) -> NDArray[np.int64]:
        """[L, Hkv, count] flat rows of the last `count` rows of every head."""
        lengths = self.lengths[slot]
        assert count <= lengths.min(), "more rows than a head holds"
        head = np.arange(lengths.size).reshape(*lengths.shape, 1)
        return self.locate(slot, head, lengths[..., None] - count + np.arange(count))

    def unused_rows(self, slot: int) -> NDArray[np.int64]:
        """[n] flat rows past the end of every head in its last page."""
        lengths = self.lengths[slot].ravel().astype(np.int64)
        unused = -lengths % self.page_size
        head = np.repeat(np.arange(lengths.size), unused)
        return self.locate(slot, head, lengths[head] + _rank(unused))

    def moves(
        self, slot: int, offsets: NDArray[np.int64], rows: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Flat rows (source, target) that pack the kept `rows` of every head, CSR by `offsets`, to its front.

        Rows already in place are left out. Both ascend in every head and target <= source.
        """
        counts = np.diff(offsets)
        head, rank = np.repeat(np.arange(counts.size), counts), _rank(counts)
        moved = np.flatnonzero(rank != rows)
        return self.locate(slot, head[moved], rows[moved]), self.locate(slot, head[moved], rank[moved])

    def _widen(self, pages: int) -> None:
        missing = pages - self.pages.shape[-1]
        if missing > 0:
            wider = max(missing, self.pages.shape[-1])
            self.pages = np.pad(self.pages, ((0, 0), (0, 0), (0, 0), (0, wider)), constant_values=-1)


def _rank(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. counts[i] - 1 for every i, joined."""
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(starts, counts)
