"""Placement of pages: in one piece where possible, never refused while enough are free."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.pool.allocator import EXTENT, PageAllocator


def test_heads_of_a_layer_are_equally_spaced_with_room_between() -> None:
    allocator = PageAllocator(100)
    first = allocator.place(np.array([3, 3, 3]), spacing=5)
    assert [pages.tolist() for pages in first] == [[0, 1, 2], [5, 6, 7], [10, 11, 12]]
    second = allocator.place(np.array([3, 3, 3]), spacing=5)
    assert [pages[0] for pages in second] == [15, 20, 25]  # the room after the first layer's last head is left
    assert allocator.grow(12, 2).tolist() == [13, 14]
    assert allocator.free_pages == 100 - 18 - 2


def test_a_full_pool_is_used_side_by_side_then_head_by_head_then_page_by_page() -> None:
    allocator = PageAllocator(12)
    assert [pages.tolist() for pages in allocator.place(np.array([2, 2]), spacing=8)] == [[0, 1], [2, 3]]
    allocator.release(allocator.place(np.array([2, 2]), spacing=2)[0])
    assert [pages.tolist() for pages in allocator.place(np.array([2, 2]), spacing=2)] == [[8, 9], [10, 11]]
    scattered = PageAllocator(9)
    scattered.release(scattered.place(np.array([9]), spacing=9)[0][[0, 3, 4, 8]])
    assert [pages.tolist() for pages in scattered.place(np.array([2, 2]), spacing=2)] == [[3, 4], [0, 8]]


def test_heads_growing_in_turn_do_not_interleave() -> None:
    allocator = PageAllocator(6 * EXTENT)
    heads = [pages.tolist() for pages in allocator.place(np.array([2, 2]), spacing=2)]
    for _ in range(EXTENT):
        for head in heads:
            head.extend(allocator.grow(head[-1], 1).tolist())
    for head in heads:
        breaks = np.flatnonzero(np.diff(head) != 1)
        assert len(breaks) <= 1, "a head is in more than two pieces"


def test_a_page_is_not_freed_twice() -> None:
    allocator = PageAllocator(4)
    [pages] = allocator.place(np.array([2]), spacing=2)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.release(np.concatenate([pages, pages]))
    allocator.release(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.release(pages)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_request_fails_while_enough_pages_are_free(data: st.DataObject) -> None:
    pages = data.draw(st.integers(1, 40))
    allocator, held = PageAllocator(pages), list[int]()
    for _ in range(8):
        to_free = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        for page in to_free:
            allocator.release(np.array([page]))
            held.remove(page)
        count = data.draw(st.integers(0, allocator.free_pages))
        growing = data.draw(st.booleans())
        if held and growing:
            taken = [allocator.grow(data.draw(st.sampled_from(held)), count)]
        else:
            share = count // 2 if data.draw(st.booleans()) else data.draw(st.integers(0, count))
            counts = np.array([share, count - share])
            taken = allocator.place(counts, spacing=max(1, int(counts.max()) + data.draw(st.integers(0, 9))))
            assert [head.size for head in taken] == counts.tolist()
        fresh = np.concatenate(taken).tolist()
        assert len(set(fresh)) == len(fresh) and not set(fresh) & set(held)
        held += fresh
        assert allocator.free_pages == pages - len(held) == np.count_nonzero(allocator.free)
