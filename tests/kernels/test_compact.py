"""Compaction against the pool's own, byte for byte on the same memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.paged import CacheType, PagedCache
from bpkv_trt.pool import CompactionPlan, PagedKvPool
from tests.kernels.paged_caches import NOWHERE, laid_out, random_rows

LAYERS, HEADS, PAGE = 2, 2, 16


def random_bytes(tensor):
    """Fill with any bits: among floats many NaN, each with a payload."""
    tensor.view(torch.uint8).random_(0, 256)


def ragged_pool(dtype, head_dim):
    """Two sequences that grew in turn, every head compacted once at random."""
    pool = PagedKvPool(layers=LAYERS, kv_heads=HEADS, head_dim=head_dim, pages=120, page_size=PAGE, dtype=dtype)
    sequences = [pool.admit(), pool.admit()]
    for count in (90, 60):
        for sequence in sequences:
            pool.extend(sequence, count)
    for sequence in sequences:
        view = pool.view(sequence)
        pool.apply(CompactionPlan.from_eviction(view, torch.rand(LAYERS, HEADS, 150) < 0.1))
    random_bytes(pool.keys)
    random_bytes(pool.values)
    return pool, sequences


def joined_plans(plans, device):
    """(rows, offsets) of several plans, as one launch takes them."""
    counts = np.concatenate([plan.counts.ravel() for plan in plans])
    rows = torch.from_numpy(np.concatenate([plan.rows for plan in plans]))
    return rows.to(device), torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])).to(device)


def as_cache(pool, sequences, device):
    """All layers of the sequences as one cache over a copy of the pool's memory; returns it and the copies."""
    tables = [torch.from_numpy(pool.page_table(sequence)) for sequence in sequences]
    width = max(table.shape[-1] for table in tables)
    pages = torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[-1]), value=-1) for table in tables])
    pages = pages.masked_fill(pages < 0, NOWHERE).to(device)
    lengths = torch.from_numpy(np.concatenate([pool.lengths(sequence) for sequence in sequences])).to(device)
    memory = [each.clone().to(device) for each in (pool.keys, pool.values, pool.row_positions)]
    addresses = torch.tensor([memory[0].data_ptr(), memory[1].data_ptr()], device=device)
    cache_type = CacheType.of(pool.keys.dtype)
    return PagedCache(addresses, pages, pages, lengths, cache_type, pool.page_size, pool.head_dim), memory


def evictions(view, kind):
    """[L, Hkv, T] bool that leave every head some rows."""
    shape = (*view.lengths.shape, int(view.lengths.max()))
    if kind == "nothing":
        return torch.zeros(shape, dtype=torch.bool)
    evict = torch.rand(shape) < 0.5
    if kind == "all but one row of a head":
        evict[1, 0] = torch.arange(shape[-1]) != 77
    if kind == "behind a long front":
        evict[..., :100] = False
    return evict


@pytest.mark.parametrize("kind", ["nothing", "half", "all but one row of a head", "behind a long front"])
@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 16), (torch.bfloat16, 24), (torch.int8, 96)])
def test_the_kernel_moves_what_the_pool_moves(device, dtype, head_dim, kind):
    pool, sequences = ragged_pool(dtype, head_dim)
    cache, memory = as_cache(pool, sequences, device)
    plans = [CompactionPlan.from_eviction(view, evictions(view, kind)) for view in map(pool.view, sequences)]
    compact(*joined_plans(plans, device), cache, memory[2])
    for plan in plans:
        pool.apply(plan)
    for ours, expected in zip(memory, (pool.keys, pool.values, pool.row_positions), strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_heads_of_shared_blocks_keep_rows_of_their_own(device, dtype):
    rows = random_rows([[100, 100], [40, 40]], dtype, 16)
    laid = laid_out(rows, rows, device, page_size=PAGE, shared_pages=True)
    random_bytes(laid.memory[0])
    before = laid.memory[0].view(torch.uint8).cpu().clone()
    expected, kept = before.clone(), []
    for sequence, (length, count) in enumerate(((100, 70), (40, 40))):
        for head in range(2):
            source, target = torch.randperm(length)[:count].sort().values, torch.arange(count)
            kept.append(source)
            for pages in (laid.cache.key_pages, laid.cache.value_pages):
                page = (pages[sequence, 0].cpu().long() + laid.cache.first_page)[:, None].expand(-1, PAGE).ravel()
                moved = before[page[source], head, source % PAGE]
                expected[page[target], head, target % PAGE] = moved
    offsets = torch.tensor([0, 70, 140, 180, 220], dtype=torch.int32, device=device)
    compact(torch.cat(kept).int().to(device), offsets, laid.cache, None)
    assert torch.equal(laid.memory[0].view(torch.uint8).cpu(), expected)


def test_arguments_that_do_not_fit_are_refused(device):
    held = random_rows([[20, 30]], torch.float16, 16)
    cache = laid_out(held, held, device).cache
    rows, offsets = torch.arange(4, dtype=torch.int32, device=device), torch.tensor([0, 2, 4], device=device)
    positions = torch.zeros(9, 16, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="rows is torch.int64; expected torch.int32"):
        compact(rows.long(), offsets, cache, positions)
    with pytest.raises(ValueError, match=r"rows has strides \(2,\)"):
        compact(rows[::2], offsets, cache, positions)
    with pytest.raises(ValueError, match=r"offsets has shape \(2,\); expected \(3\)"):
        compact(rows, offsets[:2], cache, positions)
    with pytest.raises(ValueError, match="positions: expected for pages of one head"):
        compact(rows, offsets, cache, None)
    with pytest.raises(ValueError, match=r"positions has shape \(16, 9\); expected \(any, 16\)"):
        compact(rows, offsets, cache, positions.T.contiguous())
    with pytest.raises(ValueError, match="a row of the cache is 3 bytes; expected a multiple of 4"):
        compact(rows, offsets, replace(cache, head_dim=3, type=CacheType.INT8), positions)
