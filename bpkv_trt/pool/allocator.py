"""Which pages are free, and where new ones are taken so that a head's rows stay in one piece."""

import numpy as np
from numpy.typing import NDArray

EXTENT = 8  # pages; heads that grow in turn each open an extent of their own and so do not interleave

Pages = NDArray[np.int32]


class PageAllocator:
    """Free pages of a pool. Placement is a preference only: a request never fails while enough pages are free.

    A contiguous head is read without a copy, so pages are looked for in this order: equally spaced heads in one
    range, one run per head, any pages.
    """

    def __init__(self, pages: int) -> None:
        self.free = np.ones(pages, dtype=bool)  # [pages]
        self.free_pages = pages

    def place(self, counts: NDArray[np.int64], spacing: int) -> list[Pages]:
        """Take `counts[h]` pages for every head of an empty layer.

        Equal counts get one range with the heads `spacing` >= count pages apart (what lies between stays free, for
        growth), else side by side, else every head for itself.
        """
        widest = int(counts.max())
        if widest and (counts == widest).all():
            for step, align in ((spacing, spacing), (widest, 1)):
                start = self._first_run(step * counts.size, align)
                if start is not None:
                    return [self._take(np.arange(widest) + start + step * head) for head in range(counts.size)]
        return [self._take_elsewhere(int(count)) for count in counts]

    def grow(self, last: int | None, count: int) -> Pages:
        """Take `count` pages for a head that ends on page `last`: those right after it as far as they are free."""
        if last is None:
            return self._take_elsewhere(count)
        following = self.free[last + 1 : last + 1 + count]
        adjacent = following.size if following.all() else int(following.argmin())
        pages = self._take(np.arange(last + 1, last + 1 + adjacent))
        return pages if adjacent == count else np.concatenate([pages, self._take_elsewhere(count - adjacent)])

    def release(self, pages: NDArray[np.integer]) -> None:
        """Give pages back; each must be held."""
        assert not self.free[pages].any() and np.unique(pages).size == pages.size, "a page is freed twice"
        self.free[pages] = True
        self.free_pages += pages.size

    def _take_elsewhere(self, count: int) -> Pages:
        """Whole aligned extents first, then any run that is long enough, then whatever is free."""
        start = self._first_run(-(-count // EXTENT) * EXTENT, EXTENT)
        if start is None:
            start = self._first_run(count)
        return self._take(np.flatnonzero(self.free)[:count] if start is None else np.arange(start, start + count))

    def _first_run(self, count: int, align: int = 1) -> int | None:
        """First multiple of `align` from which `count` pages are free."""
        edges = np.flatnonzero(np.diff(self.free, prepend=False, append=False))  # where runs begin and end, in turn
        starts, ends = -(-edges[::2] // align) * align, edges[1::2]
        fitting = np.flatnonzero(ends - starts >= count)
        return int(starts[fitting[0]]) if fitting.size else None

    def _take(self, pages: NDArray[np.integer]) -> Pages:
        assert self.free[pages].all(), "a page is taken twice"
        self.free[pages] = False
        self.free_pages -= pages.size
        return pages.astype(np.int32)
