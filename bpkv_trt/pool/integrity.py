"""Consistency of a pool's bookkeeping, judged from the raw tables alone."""

import numpy as np
import torch

from bpkv_trt.pool.allocator import PageAllocator
from bpkv_trt.pool.storage import RowStorage
from bpkv_trt.pool.table import PageTable


def check_integrity(allocator: PageAllocator, table: PageTable, storage: RowStorage, *, poisoned: bool) -> None:
    """Raise AssertionError where free, owned and used pages, lengths or positions contradict one another.

    With `poisoned`, everything that no head holds must be NaN too: a stray write shows.
    """
    live = table.pages[list(table.slots.values())]
    owned = live[live >= 0]
    assert np.unique(owned).size == owned.size, "a page is owned twice"
    assert not allocator.free[owned].any(), "an owned page is free"
    assert allocator.free_pages == np.count_nonzero(allocator.free), "the count of free pages is wrong"
    assert owned.size + allocator.free_pages == allocator.free.size, "a page is neither free nor owned"
    for slot in table.slots.values():
        _check_sequence(table, slot, storage)
    if poisoned:
        _check_poison(table, storage)


def _check_sequence(table: PageTable, slot: int, storage: RowStorage) -> None:
    lengths, pages = table.lengths[slot], table.pages[slot]
    assert (lengths >= 0).all() and lengths.max() <= table.logical[slot], "a head has an impossible length"
    held = np.arange(pages.shape[-1]) < -(-lengths[..., None] // table.page_size)
    assert np.array_equal(pages >= 0, held), "a head's pages are not those that its length fills"
    for head, length in enumerate(lengths.ravel()):
        positions = storage.position_rows[storage.index(table.locate(slot, head, np.arange(length)))]
        assert bool((positions.diff() > 0).all()), "the positions of a head do not ascend"
        if length:
            assert positions[0] >= 0 and positions[-1] < table.logical[slot], "a position was never given out"


def _check_poison(table: PageTable, storage: RowStorage) -> None:
    unused = torch.ones_like(storage.position_rows, dtype=torch.bool)
    for slot in table.slots.values():
        for head, length in enumerate(table.lengths[slot].ravel()):
            unused[storage.index(table.locate(slot, head, np.arange(length)))] = False
    assert bool(storage.key_rows[unused].isnan().all()), "a key lies where no head holds a row"
    assert bool(storage.value_rows[unused].isnan().all()), "a value lies where no head holds a row"
    assert bool((storage.position_rows[unused] == -1).all()), "a position lies where no head holds a row"
