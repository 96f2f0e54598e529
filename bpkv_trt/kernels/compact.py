"""Packing the kept rows of every head to the front of its pages, in place."""

import torch
from torch import Tensor

from bpkv_trt.kernels.arguments import expect
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.launch import launch
from bpkv_trt.kernels.paged import PagedCache, pointer, row_offsets
from bpkv_trt.kernels.rounding import next_power_of_2

TILE = 64  # rows read before the first of them is written: 32 KiB of K and V at D 128 in bf16
WORD = 4  # bytes; rows move as words, whatever they hold


def compact(rows: Tensor, offsets: Tensor, cache: PagedCache, positions: Tensor | None) -> None:
    """Keep only the given rows of every head, packed to its front: keys, values and positions, in one launch.

    rows [n] int32 kept rows of each (sequence, KV head) in turn, counted from the head's first, ascending; offsets
    [B Hkv + 1] int32 or int64 where each head's begin. positions [pages, page_size] int32 is the side array of pages
    that belong to one head, all that a list may name (page 0 is the page at `addresses`); shared pages have none. Bytes
    are moved, never converted. What lies behind the kept rows stays as it was, and so do lengths and page lists: they
    are the pool's.

    All L layers go in one launch: (sequence, layer) pairs count as sequences, B L of them, with page lists that name
    pages from one beginning (in TensorRT-LLM's blocks: offset + 2 layer). The plan is the pool's to validate: values on
    the device are not read back to be checked, so offsets that do not ascend from 0 to n, rows that do not ascend or
    exist, and pages beyond the pool or `positions` are not noticed here. Runs on the current device. Raises TypeError
    or ValueError, before any launch, where an argument does not fit.
    """
    expect("rows", rows, (None,), [torch.int32], cache.device)
    expect("offsets", offsets, (cache.sequences * cache.kv_heads + 1,), [torch.int32, torch.int64], cache.device)
    if cache.shared_pages != (positions is None):
        raise ValueError("positions: expected for pages of one head, and None for shared pages.")
    if positions is not None:
        expect("positions", positions, (None, cache.page_size), [torch.int32], cache.device)
    row_bytes = cache.head_dim * cache.type.itemsize
    if row_bytes % WORD:
        raise ValueError(f"a row of the cache is {row_bytes} bytes; expected a multiple of {WORD}.")
    launch(
        pack_rows,
        (cache.kv_heads, cache.sequences),
        rows,
        offsets,
        cache.addresses,
        cache.key_pages,
        cache.value_pages,
        *cache.list_strides,
        cache.first_page,
        positions,
        HEADS=cache.page_heads,
        PAGE_SIZE=cache.page_size,
        WORDS=row_bytes // WORD,
        WIDTH=next_power_of_2(row_bytes // WORD),
        TILE=TILE,
        warps=8,
        stages=1,
    )


@triton.jit
def pack_rows(
    rows,  # *i32 [n]
    offsets,  # *i32 or *i64 [B Hkv + 1]
    addresses,  # *i64 [2]: what lies there is written
    key_pages,  # *i32 [B, Hkv or 1, P]
    value_pages,  # *i32 of the same strides
    sequence_stride,  # of the page lists
    head_stride,
    first_page,
    positions,  # *i32 [pages, PAGE_SIZE], or None; written
    HEADS: tl.constexpr,  # heads in a page
    PAGE_SIZE: tl.constexpr,
    WORDS: tl.constexpr,  # in a row
    WIDTH: tl.constexpr,  # WORDS, or the next power of two
    TILE: tl.constexpr,
):
    """Grid (Hkv, B): one head. Rows only move down, so ascending tiles, each read whole before it is written, are safe.

    Nothing else is: a tile's targets hold rows that other threads of it have still to read, and rows of earlier tiles.
    One barrier is enough, since a tile's targets lie before all rows of later tiles.

    Floor: each moved row is read and written, 4 D numbers. Llama-3.1-8B, 64k tokens in bf16 of which a fifth stays, 32
    layers: 3.4 GB, 0.7 ms on an H200. Bytes bind, with 256 programs; the 8 of one layer are bound by latency.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    entry = sequence * tl.num_programs(0) + head
    first = tl.load(offsets + entry)
    count = (tl.load(offsets + entry + 1) - first).to(tl.int32)
    kept = rows + first
    pages = sequence * sequence_stride + head * head_stride
    key_list, value_list = key_pages + pages, value_pages + pages
    keys, values = pointer(tl.load(addresses), tl.int32), pointer(tl.load(addresses + 1), tl.int32)
    word = tl.arange(0, WIDTH)[None, :]
    for start in range(rows_in_place(kept, count), count, TILE):
        target = start + tl.arange(0, TILE)
        held = target < count
        wide = held[:, None] & (word < WORDS)
        source = tl.load(kept + target, mask=held, other=0)
        key_source = row_offsets(key_list, source, held, head, first_page, HEADS, PAGE_SIZE, 1)
        value_source = row_offsets(value_list, source, held, head, first_page, HEADS, PAGE_SIZE, 1)
        key_target = row_offsets(key_list, target, held, head, first_page, HEADS, PAGE_SIZE, 1)
        value_target = row_offsets(value_list, target, held, head, first_page, HEADS, PAGE_SIZE, 1)

        key_rows = tl.load(keys + key_source[:, None] * WORDS + word, mask=wide)
        value_rows = tl.load(values + value_source[:, None] * WORDS + word, mask=wide)
        if positions is not None:
            row_positions = tl.load(positions + key_source, mask=held)
        tl.debug_barrier()
        tl.store(keys + key_target[:, None] * WORDS + word, key_rows, mask=wide)
        tl.store(values + value_target[:, None] * WORDS + word, value_rows, mask=wide)
        if positions is not None:
            tl.store(positions + key_target, row_positions, mask=held)


@triton.jit
def rows_in_place(kept, count):
    """How many kept rows already lie at the front: bit by bit, since kept[i] - i never falls."""
    found = 0
    for bit in range(31):
        longer = found + (1 << (30 - bit))
        last = tl.load(kept + longer - 1, mask=longer <= count, other=-1)
        found = tl.where(last == longer - 1, longer, found)
    return found
