"""The log-sum-exp of the attention logits of every scoring position: the one pass that weights need before scores."""

import torch
from torch import Tensor

from bpkv_trt.kernels.arguments import FLOATS, expect, expect_finite, expect_int
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.launch import launch
from bpkv_trt.kernels.paged import PagedCache, load_rows, row_offsets, tile_rows
from bpkv_trt.kernels.positions import BLOCK_ROWS, PositionBlocks, block_rows, sees
from bpkv_trt.kernels.rounding import ceil_div

TILE = 128  # rows of K at a time, at most
LOGITS = 4096  # at a time, at most: what the registers of 4 warps hold on every target
ROWS_PER_SPLIT = 4 * TILE  # at least, so that a partial costs little beside them
MOST_SPLITS = 128  # with 8 KV heads that is over 7 programs for each multiprocessor of the largest GPUs
COMBINED_COLUMNS = 32
INFINITY = tl.constexpr(float("inf"))


def log_sum_exp(
    q: Tensor,
    offsets: Tensor,
    cache: PagedCache,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    positions: int,
) -> Tensor:
    """log sum_t exp(logit_t) over the rows that each position sees; -inf where it sees none. Returns [S, Hq] fp32.

    q [S, Hq, D] fp32, fp16 or bf16, after RoPE; rows offsets[b] .. offsets[b + 1] ([B + 1] int32) are those of sequence
    b, at most `positions` of them. The last owns the last row of each head, position j of n sees the rows before
    length - (n - 1 - j), and with a window W only the last W of these. logit = scale q.k, with a softcap c
    c tanh(logit / c). Raises TypeError and ValueError for arguments that do not fit. Values on the device are not read
    back to be checked: the caller provides offsets that ascend from 0 to S with at most `positions` rows each, and
    lengths within the page lists.
    """
    expect_queries(q, offsets, cache, scale, softcap, window)
    rows, heads, width = q.shape
    blocks = PositionBlocks(positions, heads // cache.kv_heads)
    splits = max(1, min(MOST_SPLITS, ceil_div(cache.capacity, ROWS_PER_SPLIT)))
    result = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return result
    partials = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    launch(
        partial_log_sum_exp,
        (blocks.count * splits, cache.kv_heads, cache.sequences),
        q,
        offsets,
        cache.addresses,
        cache.key_pages,
        cache.lengths,
        rows,
        blocks.count,
        *cache.list_strides,
        *cache.length_strides,
        cache.first_page,
        cache.capacity if window is None else window,
        scale * cache.key_scale,
        partials,
        KV_HEADS=cache.kv_heads,
        **blocks.constants,
        **cache.constants,
        TYPE=cache.type.operand(q.dtype),
        SOFTCAP=softcap,
        TILE=tile_rows(min(TILE, LOGITS // (blocks.size * blocks.padded_group)), width, q.dtype),
        warps=4,
    )
    launch(
        combined_log_sum_exp,
        (ceil_div(rows * heads, COMBINED_COLUMNS),),
        partials,
        splits,
        rows * heads,
        result,
        SPLITS=MOST_SPLITS,
        COLUMNS=COMBINED_COLUMNS,
        warps=4,
    )
    return result


def expect_queries(
    q: Tensor, offsets: Tensor | None, cache: PagedCache, scale: float, softcap: float | None, window: int | None
) -> None:
    """Raise TypeError or ValueError unless they fit together; without offsets q has one row for every sequence."""
    rows = cache.sequences if offsets is None else None
    expect("q", q, (rows, None, cache.head_dim), FLOATS, cache.device)
    if offsets is not None:
        expect("offsets", offsets, (cache.sequences + 1,), [torch.int32], cache.device)
    group, rest = divmod(q.shape[1], cache.kv_heads)
    if rest or not 1 <= group <= BLOCK_ROWS:
        raise ValueError(
            f"q has {q.shape[1]} heads; expected a multiple of the cache's {cache.kv_heads}, 1 to {BLOCK_ROWS} times."
        )
    expect_finite("scale", scale)
    if softcap is not None:
        expect_finite("softcap", softcap)
        if not softcap > 0:
            raise ValueError(f"softcap is {softcap}; expected None or a number above 0.")
    if window is not None:
        expect_int("window", window, 1)


@triton.jit
def partial_log_sum_exp(
    q,  # [S, Hq, D]
    offsets,  # [B + 1] int32
    addresses,  # [2] int64
    key_pages,  # [B, Hkv or 1, P] int32
    lengths,  # [B, Hkv] int32
    rows,  # S
    blocks,  # of positions
    sequence_stride,  # of key_pages
    head_stride,
    length_sequence_stride,
    length_head_stride,
    first_page,
    window,  # rows that a position sees at most
    scale,  # of a stored key
    partials,  # [splits, S, Hq] fp32
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
    TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One block of positions, one KV head and one equal share of its tiles, whose log-sum-exp is one partial.

    Floor: reads K once, Hkv T D elements (the blocks of a share run side by side and meet in L2), 2 Hq T D M FLOPs.
    32 query and 8 KV heads, D 128, 64k tokens, bf16: 134 MB, 28 us at 4.8 TB/s; M 40: 21 GFLOP, 22 us at 990 TFLOP/s.
    Bandwidth binds.
    """
    split, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets + sequence)
    positions = tl.load(offsets + sequence + 1) - first
    if block * BLOCK >= positions:
        return
    position, head, exists = block_rows(block, positions, kv_head, GROUP, PADDED_GROUP, BLOCK)
    # Only what is the same for a whole program is counted in int64.
    q += first.to(tl.int64) * (KV_HEADS * GROUP * D)
    pair = position * (KV_HEADS * GROUP) + head
    column = tl.arange(0, WIDTH)
    query_mask = exists[:, None] & (column < D)[None, :]
    queries = tl.load(q + pair[:, None] * D + column[None, :], mask=query_mask, other=0.0).to(TYPE)

    length = tl.load(lengths + sequence * length_sequence_stride + kv_head * length_head_stride)
    pages = key_pages + sequence * sequence_stride + kv_head * head_stride
    address = tl.load(addresses)
    begin = tl.maximum(length - positions + 1 - window, 0) // TILE  # tiles before it are in nobody's window
    end = tl.cdiv(length, TILE)
    share = tl.cdiv(end - begin, tl.num_programs(0) // blocks)
    begin += split * share
    largest = tl.full([BLOCK * PADDED_GROUP], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK * PADDED_GROUP], tl.float32)
    for tile in range(begin, tl.minimum(begin + share, end)):
        row = tile * TILE + tl.arange(0, TILE)
        held = row < length
        places = row_offsets(pages, row, held, kv_head, first_page, PAGE_HEADS, PAGE_SIZE, D)
        keys = load_rows(address, places, held, D, WIDTH, CACHE, TYPE)
        logits = attention_logits(keys, queries, scale, SOFTCAP)
        logits = tl.where(sees(row, position, length, positions, window), logits, -INFINITY)
        before = largest
        largest = tl.maximum(largest, tl.max(logits, axis=0))
        base = tl.where(largest == -INFINITY, 0.0, largest)  # nothing seen yet: no inf - inf
        total = total * tl.exp(before - base) + tl.sum(tl.exp(logits - base[None, :]), axis=0)
    partial = largest + tl.log(tl.where(total == 0, 1.0, total))
    partials += (split.to(tl.int64) * rows + first) * (KV_HEADS * GROUP)
    tl.store(partials + pair, partial, mask=exists)


@triton.jit
def combined_log_sum_exp(
    partials,  # [splits, N] fp32
    splits,
    columns,  # N
    result,  # [N] fp32
    SPLITS: tl.constexpr,  # the most there can be
    COLUMNS: tl.constexpr,
):
    """Floor: splits N numbers read, 0.3 MB at 128 splits, 16 positions and 32 heads: the launch binds."""
    split = tl.arange(0, SPLITS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (split < splits) & (column < columns)[None, :]
    place = split.to(tl.int64) * columns + column[None, :]
    partial = tl.load(partials + place, mask=mask, other=-INFINITY)
    largest = tl.max(partial, axis=0)
    base = tl.where(largest == -INFINITY, 0.0, largest)
    total = tl.sum(tl.exp(partial - base[None, :]), axis=0)
    tl.store(result + column, largest + tl.log(tl.where(total == 0, 1.0, total)), mask=column < columns)


@triton.jit
def attention_logits(
    keys,  # [T, WIDTH]
    queries,  # [R, WIDTH]
    scale,
    SOFTCAP: tl.constexpr,
):
    """[T, R] fp32 logits as the softmax takes them; those of fp32 by three products in tf32, which keep 22 bits."""
    logits = tl.dot(keys, tl.trans(queries), input_precision="tf32x3") * scale
    if SOFTCAP is not None:
        shrunk = tl.exp(tl.abs(logits) * (-2 / SOFTCAP))  # e^-2|x| of tanh |x|, which never overflows
        capped = SOFTCAP * (1 - shrunk) / (1 + shrunk)
        logits = tl.where(logits < 0, -capped, capped)
    return logits


@triton.jit
def attention(
    keys,  # [T, WIDTH]
    queries,  # [R, WIDTH]
    lse,  # [R]
    seen,  # [T, R] bool
    scale,
    SOFTCAP: tl.constexpr,
):
    """[T, R] fp32 weights, exactly 0 where nothing is seen."""
    logits = attention_logits(keys, queries, scale, SOFTCAP)
    return tl.exp(tl.where(seen, logits - lse[None, :], -INFINITY))
