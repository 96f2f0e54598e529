"""The page table where kernels find it: a copy on the pool's device, brought up to date whenever it is asked for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bpkv_trt.pool.kernel_access import PagedCache, compact, readable_type
from bpkv_trt.pool.storage import RowStorage
from bpkv_trt.pool.table import PageTable


class DeviceTable:
    """Tables of a pool's sequences for kernels. What it hands out is good until one of these sequences changes."""

    def __init__(self, table: PageTable, storage: RowStorage) -> None:
        """Raises ConfigError for rows that kernels cannot read, and where there is nothing to run them."""
        self.table, self.storage = table, storage
        self.type = readable_type(storage.keys.dtype, storage.keys.shape[2], self.device)
        starts = [storage.keys.data_ptr(), storage.values.data_ptr()]
        self.addresses = torch.tensor(starts, dtype=torch.int64, device=self.device)
        self._known = table.pages.copy()  # what the device has
        self._pages = self._uploaded(self._known)  # [slots, L, Hkv, P] int32

    @property
    def device(self) -> torch.device:
        return self.storage.keys.device

    def caches(self, slots: Sequence[int]) -> list[PagedCache]:
        """By layer, the rows of all these slots' sequences."""
        pages = self._pages_of(slots).transpose(0, 1)  # [L, B, Hkv, P]
        lengths = self._uploaded(self.table.lengths[list(slots)].swapaxes(0, 1))  # [L, B, Hkv]
        return [self._cache(*layer) for layer in zip(pages, lengths, strict=True)]

    def pack(self, slot: int, offsets: np.ndarray, rows: np.ndarray) -> None:
        """Keep only the rows of every head, CSR by `offsets`, packed to its front, K, V and positions alike."""
        layers = self._cache(self._pages_of([slot])[0], self._uploaded(self.table.lengths[slot]))
        compact(self._uploaded(rows), self._uploaded(offsets), layers, self.storage.positions)

    def _cache(self, pages: Tensor, lengths: Tensor) -> PagedCache:
        _, page_size, head_dim = self.storage.keys.shape
        return PagedCache(self.addresses, pages, pages, lengths, self.type, page_size, head_dim)

    def _pages_of(self, slots: Sequence[int]) -> Tensor:
        """[B, L, Hkv, P] int32, P the most pages of any head among them."""
        if self._known.shape != self.table.pages.shape:
            self._known = self.table.pages.copy()
            self._pages = self._uploaded(self._known)
        for slot in slots:
            self._bring_up_to_date(slot)
        longest = max(int(self.table.page_counts(slot).max()) for slot in slots)
        held = self._pages[..., :longest]
        return held[slots[0]][None] if len(slots) == 1 else held[list(slots)]

    def _bring_up_to_date(self, slot: int) -> None:
        known, now = self._known[slot].ravel(), self.table.pages[slot].ravel()
        changed = np.flatnonzero(known != now)
        if changed.size:
            self._pages[slot].view(-1)[self._uploaded(changed)] = self._uploaded(now[changed])
            known[changed] = now[changed]

    def _uploaded(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array, order="C")).to(self.device)  # a copy also where that is the CPU
