"""What the pool promises beyond contents: atomicity, exact frees, bytes, contiguity, placement on other page sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bpkv_trt.errors import PoolExhausted, StalePlan
from bpkv_trt.pool import CompactionPlan, PagedKvPool
from tests.pool.snapshot import Snapshot

LAYERS, HEADS, WIDTH, PAGE = 3, 2, 4, 8


def make_pool(pages: int, dtype: torch.dtype = torch.float32, page_size: int = PAGE, heads: int = HEADS) -> PagedKvPool:
    return PagedKvPool(
        layers=LAYERS, kv_heads=heads, head_dim=WIDTH, pages=pages, page_size=page_size, dtype=dtype, poison=True
    )


def fill(pool: PagedKvPool, sequence: int, count: int) -> None:
    pool.extend(sequence, count)
    for layer in range(pool.layers):
        k, v = torch.randn(2, pool.kv_heads, count, pool.head_dim).to(pool.keys.dtype)
        pool.write(sequence, layer, k, v)


def keep(pool: PagedKvPool, sequence: int, counts: NDArray[np.int64]) -> CompactionPlan:
    """Keep the last `counts` [L, Hkv] rows of every head."""
    view = pool.view(sequence)
    rows = torch.arange(int(view.lengths.max()))
    return CompactionPlan.from_eviction(view, rows < torch.from_numpy(view.lengths - counts)[..., None])


def test_exhausted_extend_and_fork_change_nothing() -> None:
    pool = make_pool(pages=LAYERS * HEADS * 3)
    sequence, other = pool.admit(), pool.admit()
    fill(pool, sequence, 2 * PAGE - 1)
    snapshot = Snapshot(pool)
    with pytest.raises(PoolExhausted, match="12 pages of 8 rows are needed and 6 of 18 are free"):
        pool.extend(sequence, PAGE + 2)
    with pytest.raises(PoolExhausted, match="copy"):
        pool.fork(sequence)
    with pytest.raises(PoolExhausted):
        pool.extend_all([(other, 1), (sequence, 2)])  # each alone would fit
    snapshot.assert_unchanged()
    pool.extend_all([(other, 1), (sequence, 1)])
    assert pool.free_pages == 0
    pool.check_integrity()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plan: {"sequence": 77}, "does not hold"),
        (lambda plan: {"lengths": plan.lengths + 1}, "another state"),
        (lambda plan: {"logical_length": plan.logical_length + 1}, "another state"),
        (lambda plan: {"offsets": plan.offsets[:-1]}, "does not list the kept rows of 6 heads"),
        (lambda plan: {"offsets": plan.offsets + 1}, "does not list the kept rows of 6 heads"),
        (lambda plan: {"offsets": np.array([0, 9, 3, *plan.offsets[3:]])}, "descend"),
        (lambda plan: {"offsets": np.array([0, 0, *plan.offsets[2:]])}, "every row of layer 0, KV head 0"),
        (lambda plan: {"rows": plan.rows[::-1].copy()}, "do not ascend"),
        (lambda plan: {"rows": np.repeat(plan.rows[::2], 2)}, "do not ascend"),
        (lambda plan: {"rows": plan.rows + 1}, "rows that do not exist"),
        (lambda plan: {"rows": plan.rows - 20}, "rows that do not exist"),
    ],
)
def test_a_plan_that_does_not_fit_moves_nothing(change: object, reason: str) -> None:
    pool = make_pool(pages=40)
    sequence = pool.admit()
    fill(pool, sequence, 20)
    plan = keep(pool, sequence, np.full((LAYERS, HEADS), 6))
    assert callable(change)
    snapshot = Snapshot(pool)
    with pytest.raises(StalePlan, match=reason):
        pool.apply(replace(plan, **change(plan)))
    snapshot.assert_unchanged()
    pool.apply(plan)
    assert pool.entries_of(sequence) == 6 * LAYERS * HEADS


def test_a_plan_is_stale_once_the_sequence_has_moved_on() -> None:
    pool = make_pool(pages=60)
    sequence = pool.admit()
    fill(pool, sequence, 20)
    plan = keep(pool, sequence, np.full((LAYERS, HEADS), 19))
    pool.apply(plan)
    fill(pool, sequence, 1)  # the lengths are those of the plan again, the rows are not
    assert np.array_equal(pool.lengths(sequence), plan.lengths)
    snapshot = Snapshot(pool)
    with pytest.raises(StalePlan, match="another state"):
        pool.apply(plan)
    snapshot.assert_unchanged()
    pool.release(sequence)
    with pytest.raises(StalePlan, match="does not hold"):
        pool.apply(plan)


def test_eviction_masks_are_checked() -> None:
    pool = make_pool(pages=40)
    sequence = pool.admit()
    fill(pool, sequence, 9)
    view = pool.view(sequence)
    with pytest.raises(StalePlan, match=r"shape \(3, 2, 8\) where the sequence has \(3, 2, 9\)"):
        CompactionPlan.from_eviction(view, torch.zeros(LAYERS, HEADS, 8, dtype=torch.bool))
    emptied = torch.zeros(LAYERS, HEADS, 9, dtype=torch.bool)
    emptied[1, 1] = True
    with pytest.raises(StalePlan, match="every row of layer 1, KV head 1"):
        CompactionPlan.from_eviction(view, emptied)


def test_half_of_every_head_frees_exact_pages_for_a_request_of_that_size() -> None:
    heads = LAYERS * HEADS
    pool = make_pool(pages=heads * 8)
    first = pool.admit()
    fill(pool, first, 8 * PAGE)
    assert pool.free_pages == 0
    allocated = pool.keys.data_ptr(), pool.keys.nbytes
    before = pool.bytes_of(first)
    freed = pool.apply(keep(pool, first, np.full((LAYERS, HEADS), 4 * PAGE)))
    assert (freed, pool.free_pages) == (4 * heads, 4 * heads)
    assert before - pool.bytes_of(first) == 4 * heads * pool.page_bytes
    second = pool.admit()
    fill(pool, second, 4 * PAGE)
    assert pool.free_pages == 0 and (pool.keys.data_ptr(), pool.keys.nbytes) == allocated
    pool.check_integrity()
    with pytest.raises(PoolExhausted):
        pool.extend(second, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_kv_heads_alone(dtype: torch.dtype) -> None:
    pool = make_pool(pages=60, dtype=dtype)  # a model with 8 query heads has the same pool: entries are per KV head
    sequence = pool.admit()
    fill(pool, sequence, 4 * PAGE)
    assert pool.bytes_of(sequence) == 2 * pool.entries_of(sequence) * WIDTH * dtype.itemsize
    counts = np.array([[1, 8], [9, 16], [17, 32]])
    pool.apply(keep(pool, sequence, counts))
    rounded = int((-(-counts // PAGE) * PAGE).sum())
    assert pool.entries_of(sequence) == counts.sum()
    assert pool.bytes_of(sequence) == 2 * rounded * WIDTH * dtype.itemsize
    owned = pool.page_table(sequence) >= 0
    assert np.array_equal(owned.sum(-1), -(-counts // PAGE))
    assert pool.bytes_of(sequence) == owned.sum() * (pool.keys[0].nbytes + pool.values[0].nbytes)


def test_compaction_moves_long_ragged_heads_like_a_gather() -> None:
    torch.manual_seed(0)
    pool = make_pool(pages=LAYERS * HEADS * 700, page_size=16)
    sequence = pool.admit()
    fill(pool, sequence, 11_000)  # 66,000 rows: more than one tile of the move
    view = pool.view(sequence)
    evict = torch.rand(LAYERS, HEADS, 11_000) < torch.tensor([[0.01, 0.2], [0.5, 0.9], [0.0, 0.999]])[..., None]
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    expected = {head: (view.keys(*head)[~evict[head]], view.values(*head)[~evict[head]]) for head in heads}
    plan = CompactionPlan.from_eviction(view, evict)
    assert plan.rows.dtype == np.int32 and plan.offsets.dtype == np.int64
    pool.apply(plan)
    pool.check_integrity()
    view = pool.view(sequence)
    for head in heads:
        assert torch.equal(view.keys(*head), expected[head][0])
        assert torch.equal(view.values(*head), expected[head][1])
        assert torch.equal(view.positions(*head), (~evict[head]).nonzero().squeeze(1).int())
        assert np.array_equal(plan.kept(*head), view.positions(*head).numpy())
        assert torch.equal(view.position_table()[head][: view.lengths[head]], view.positions(*head))
        assert bool((view.position_table()[head][view.lengths[head] :] == -1).all())


def test_rows_are_read_in_place() -> None:
    pool = make_pool(pages=200)
    sequence = pool.admit()
    fill(pool, sequence, 3 * PAGE)
    uniform = pool.heads(sequence, 1).uniform
    assert uniform is not None
    [(k, v)] = pool.heads(sequence, 1).runs(1)
    for side, run, memory in zip(uniform, (k, v), (pool.keys, pool.values), strict=True):
        assert side.shape == (HEADS, 3 * PAGE, WIDTH)
        assert all(view.untyped_storage().data_ptr() == memory.data_ptr() for view in (side, run))
        assert side[1].data_ptr() == run.data_ptr()


def test_a_growing_sequence_stays_in_one_piece() -> None:
    pool = make_pool(pages=LAYERS * HEADS * 12 * 2)
    first, second = pool.admit(expected_rows=12 * PAGE), pool.admit(expected_rows=12 * PAGE)
    for sequence in (first, second):
        fill(pool, sequence, 5 * PAGE)
    for _ in range(7 * PAGE):  # both grow in turn until the pool is full
        fill(pool, first, 1)
        fill(pool, second, 1)
        assert all(pool.heads(sequence, layer).uniform for sequence in (first, second) for layer in range(LAYERS))
    assert pool.free_pages == 0
    pool.apply(keep(pool, first, np.array([[20, 9], [96, 1], [33, 33]])))
    assert [len(pool.heads(first, layer).runs(head)) for layer in range(LAYERS) for head in range(HEADS)] == [1] * 6
    assert [pool.heads(first, layer).uniform is not None for layer in range(LAYERS)] == [False, False, True]


def test_a_head_apart_from_its_neighbours_reads_as_runs() -> None:
    pool = make_pool(pages=2 * LAYERS * HEADS)
    first, second = pool.admit(expected_rows=1), pool.admit(expected_rows=1)
    fill(pool, first, PAGE)
    fill(pool, second, PAGE)
    pool.release(first)
    fill(pool, second, 3)  # no neighbouring page is free for every head
    for layer in range(LAYERS):
        for head in range(HEADS):
            runs = pool.heads(second, layer).runs(head)
            assert sum(k.shape[0] for k, _ in runs) == PAGE + 3
            assert torch.equal(torch.cat([k for k, _ in runs]), pool.view(second).keys(layer, head))
    assert any(len(pool.heads(second, layer).runs(head)) == 2 for layer in range(LAYERS) for head in range(HEADS))


def test_more_than_four_sequences_and_long_heads_widen_the_tables() -> None:
    pool = make_pool(pages=1000)
    sequences = [pool.admit() for _ in range(9)]
    for number, sequence in enumerate(sequences):
        fill(pool, sequence, 3 + 20 * number)
    pool.check_integrity()
    assert [int(pool.lengths(sequence).max()) for sequence in sequences] == [3 + 20 * number for number in range(9)]
    for sequence in sequences[::2]:
        pool.release(sequence)
    assert pool.admit() == 9  # a handle is never used again, though its slot is
    assert pool.live_pages == sum(pool.pages_for(3 + 20 * number) for number in range(1, 9, 2))
    pool.check_integrity()


def test_a_released_sequence_leaves_no_trace_in_the_next() -> None:
    pool = make_pool(pages=LAYERS * HEADS * 2)
    aborted = pool.admit()
    fill(pool, aborted, 2 * PAGE)
    pool.release(aborted)
    assert pool.free_pages == pool.pages and bool(pool.keys.isnan().all())
    sequence = pool.admit()
    assert pool.logical_length(sequence) == 0 and not pool.lengths(sequence).any()
    fill(pool, sequence, 3)
    assert pool.positions(sequence, 0, 0).tolist() == [0, 1, 2]
    with pytest.raises(KeyError):
        pool.heads(aborted, 0)


@settings(max_examples=60, deadline=None)
@given(
    kept=st.lists(st.integers(1, 21), min_size=LAYERS * HEADS, max_size=LAYERS * HEADS),
    chunks=st.lists(st.integers(1, 2 * PAGE + 3), min_size=1, max_size=4),
    expected_rows=st.sampled_from([0, 21, 100]),
)
def test_what_is_retracted_was_never_there(kept: list[int], chunks: list[int], expected_rows: int) -> None:
    """Ragged heads, beside another sequence; to the bit, poisoned rows, page table and free pages included."""
    pool = make_pool(pages=200)
    other, sequence = pool.admit(), pool.admit(expected_rows)
    fill(pool, sequence, 21)
    fill(pool, other, 5)
    pool.apply(keep(pool, sequence, np.array(kept).reshape(LAYERS, HEADS)))
    snapshot, held = Snapshot(pool), pool.bytes_of(sequence)
    for count in chunks:
        fill(pool, sequence, count)
    pool.check_integrity()
    pool.retract(sequence, sum(chunks))
    snapshot.assert_unchanged()
    assert (pool.bytes_of(sequence), pool.logical_length(sequence)) == (held, 21)
    fill(pool, sequence, 1)  # and it goes on from there
    assert all(pool.positions(sequence, *head)[-1] == 21 for head in np.ndindex(LAYERS, HEADS))
    pool.check_integrity()


def test_a_token_that_a_head_evicted_cannot_be_retracted() -> None:
    pool = make_pool(pages=60)
    sequence = pool.admit()
    fill(pool, sequence, 20)
    view = pool.view(sequence)
    evict = torch.zeros(LAYERS, HEADS, 20, dtype=torch.bool)
    evict[1, 1, 18] = True
    pool.apply(CompactionPlan.from_eviction(view, evict))
    snapshot = Snapshot(pool)
    with pytest.raises(AssertionError, match="evicted one of these tokens"):
        pool.retract(sequence, 2)
    snapshot.assert_unchanged()
    pool.retract(sequence, 1)
    assert pool.logical_length(sequence) == 19 and pool.entries_of(sequence) == 19 * LAYERS * HEADS - 1


def test_a_view_does_not_outlive_its_state() -> None:
    pool = make_pool(pages=40)
    sequence = pool.admit()
    fill(pool, sequence, 4)
    view = pool.view(sequence)
    fill(pool, sequence, 1)
    with pytest.raises(AssertionError, match="changed under this view"):
        view.keys(0, 0)


def test_flat_rows_do_not_overflow() -> None:
    pool = make_pool(pages=8)
    sequence = pool.admit()
    pool.extend(sequence, 1)
    far = np.iinfo(np.int32).max // 4  # a page number whose rows, times the head size, pass 2^31
    pool._table.pages[0, 2, 1, 0] = far
    assert pool._table.last_rows(0, 1)[2, 1, 0] == far * PAGE


@pytest.mark.parametrize("size", ["layers", "kv_heads", "head_dim", "pages", "page_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_pool_of_nothing_is_refused(size: str, value: int) -> None:
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 4, "pages": 2, "page_size": 8, size: value}
    with pytest.raises(AssertionError, match=f"'{size}': {value}"):
        PagedKvPool(**sizes)
