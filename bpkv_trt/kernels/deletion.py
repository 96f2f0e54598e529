"""What a mask takes from every head, and what one entry more or less would change: `core.evidence` from a cache."""

import torch
from torch import Tensor

from bpkv_trt.core.deletion import DeletionStatistics
from bpkv_trt.kernels.arguments import aligned, expect
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.launch import launch
from bpkv_trt.kernels.lse import INFINITY, attention, expect_queries
from bpkv_trt.kernels.paged import PagedCache, load_rows, row_offsets, tile_rows
from bpkv_trt.kernels.positions import BLOCK_ROWS, PositionBlocks, block_rows, sees
from bpkv_trt.kernels.rounding import ceil_div

TILE = 32  # rows at a time, at most: v - centre in fp32, in the two parts that its product takes, fills 32 KiB at D 128
TILES_PER_SPLIT = 16  # at least: a partial is as large as the queries, four times over
MOST_SPLITS = 16  # with 8 KV heads and two sides that is 2 programs for each multiprocessor of the largest GPUs
PART = 32  # numbers of a row of V at a time
FLAGS = [torch.bool, torch.uint8]


def deletion_statistics(
    q: Tensor,
    evict: Tensor,
    centre: Tensor,
    offsets: Tensor,
    cache: PagedCache,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    positions: int,
) -> DeletionStatistics:
    """Attention mass [S, Hq] and values [S, Hq, D] of the rows that leave and of those that stay.

    q, offsets, scale, softcap, window and `positions` as in `log_sum_exp`, whose result `lse` [S, Hq] fp32 is; evict
    [B, Hkv, T] bool or uint8, T at least the longest length. centre [B, Hkv, D] fp32, the mean of a head's values, is
    taken from every value: values share a large part, which would cancel only after rounding. The shift c' - c is then
    right to 2e-6 of itself, whatever they share (measured over 4,000 rows, for 3 to 97 % evicted). Around 0 it is so
    too where values share less than their spread; with ten times their spread it is wrong by 3e-5, with a hundred times
    by 3e-4. Sums over splits are torch's, of few numbers each in a fixed order: a run repeats bit for bit.
    Raises TypeError and ValueError for arguments that do not fit. Values on the device are not read back to be checked:
    offsets and lengths as in `log_sum_exp`, and a T that is at least the longest length, are the caller's to provide.
    """
    expect_queries(q, offsets, cache, scale, softcap, window)
    _check(q, evict, centre, cache, lse)
    rows, heads, width = q.shape
    most = BLOCK_ROWS if width <= 128 else BLOCK_ROWS // 2  # whose sums fit into registers
    blocks = PositionBlocks(positions, heads // cache.kv_heads, most)
    longest = evict.shape[-1]
    splits = max(1, min(MOST_SPLITS, ceil_div(longest, TILE * TILES_PER_SPLIT)))
    masses = torch.empty(splits, 2, rows, heads, dtype=torch.float32, device=q.device)
    sums = torch.empty(splits, 2, rows, heads, width, dtype=torch.float32, device=q.device)
    if rows:
        launch(
            partial_statistics,
            (2 * blocks.count * splits, cache.kv_heads, cache.sequences),
            q,
            aligned(evict.view(torch.uint8)),
            centre,
            offsets,
            cache.addresses,
            cache.key_pages,
            cache.value_pages,
            cache.lengths,
            lse,
            rows,
            blocks.count,
            longest,
            *cache.list_strides,
            *cache.length_strides,
            cache.first_page,
            cache.capacity if window is None else window,
            scale * cache.key_scale,
            cache.value_scale,
            masses,
            sums,
            KV_HEADS=cache.kv_heads,
            **blocks.constants,
            **cache.constants,
            KEY_TYPE=cache.type.operand(q.dtype),
            SOFTCAP=softcap,
            TILE=tile_rows(TILE, width, q.dtype),
            warps=8,
            stages=1,
        )
    (gone_mass, kept_mass), (gone_sum, kept_sum) = masses.sum(0), sums.sum(0)
    return DeletionStatistics(gone_mass, gone_sum, kept_mass, kept_sum)


def nomination(
    q: Tensor,
    evict: Tensor,
    centre: Tensor,
    mass: Tensor,
    contexts: Tensor,
    slopes: Tensor,
    least: Tensor,
    offsets: Tensor,
    cache: PagedCache,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    positions: int,
) -> tuple[Tensor, Tensor]:
    """What evicting each kept entry, or having evicted each gone one, costs to first order, and whether it may go.

    q, evict, centre, offsets, lse and the options as in `deletion_statistics`. The state under the mask `evict`: mass
    s [S, Hq] that each attention retains, contexts [S, Hq, D] its output c' less the centre, slopes [S, Hq, D] the
    readout rows weighted by the divergence's gradient; least [B, Hkv] the mass that a head must retain; all fp32. With
    left = s - a of a kept entry and s + a of a gone one, a sum over the query heads and positions of its KV head:

        first_order[t] = sum a / left (c' - v).slope,    admissible[t] = every left >= least

    Returns first_order [B, Hkv, T] fp32, 0 past a head's end, and admissible [B, Hkv, T] bool, False there.
    Where left is 0, which is never admissible, first_order is not finite. Raises TypeError and ValueError for arguments
    that do not fit; values on the device are the caller's, as in `deletion_statistics`.
    """
    expect_queries(q, offsets, cache, scale, softcap, window)
    _check(q, evict, centre, cache, lse)
    rows, heads, width = q.shape
    expect("mass", mass, (rows, heads), [torch.float32], cache.device)
    expect("contexts", contexts, (rows, heads, width), [torch.float32], cache.device)
    expect("slopes", slopes, (rows, heads, width), [torch.float32], cache.device)
    expect("least", least, cache.lengths.shape, [torch.float32], cache.device)
    blocks = PositionBlocks(positions, heads // cache.kv_heads)
    longest = evict.shape[-1]
    first_order = torch.zeros(evict.shape, dtype=torch.float32, device=q.device)
    admissible = torch.zeros(evict.shape, dtype=torch.bool, device=q.device)
    if longest == 0:
        return first_order, admissible
    tile = tile_rows(TILE, width, q.dtype)
    launch(
        nominate_entries,
        (ceil_div(longest, tile), cache.kv_heads, cache.sequences),
        q,
        aligned(evict.view(torch.uint8)),
        centre,
        aligned(mass),
        (contexts * slopes).sum(-1),
        slopes,
        aligned(least),
        offsets,
        cache.addresses,
        cache.key_pages,
        cache.value_pages,
        cache.lengths,
        lse,
        longest,
        *cache.list_strides,
        *cache.length_strides,
        cache.first_page,
        cache.capacity if window is None else window,
        scale * cache.key_scale,
        cache.value_scale,
        first_order,
        admissible.view(torch.uint8),
        KV_HEADS=cache.kv_heads,
        **blocks.constants,
        **cache.constants,
        KEY_TYPE=cache.type.operand(q.dtype),
        SOFTCAP=softcap,
        TILE=tile,
        PART=min(PART, cache.constants["WIDTH"]),
        warps=8,
        stages=1,
    )
    return first_order, admissible


def _check(q: Tensor, evict: Tensor, centre: Tensor, cache: PagedCache, lse: Tensor) -> None:
    expect("evict", evict, (cache.sequences, cache.kv_heads, None), FLAGS, cache.device)
    expect("centre", centre, (cache.sequences, cache.kv_heads, cache.head_dim), [torch.float32], cache.device)
    expect("lse", lse, q.shape[:2], [torch.float32], cache.device)


@triton.jit
def partial_statistics(
    q,  # [S, Hq, D]
    evict,  # [B, Hkv, longest] uint8
    centre,  # [B, Hkv, D] fp32
    offsets,  # [B + 1] int32
    addresses,  # [2] int64
    key_pages,  # [B, Hkv or 1, P] int32
    value_pages,
    lengths,  # [B, Hkv] int32
    lse,  # [S, Hq] fp32
    rows,  # S
    blocks,  # of positions
    longest,
    sequence_stride,  # of the page lists
    head_stride,
    length_sequence_stride,
    length_head_stride,
    first_page,
    window,  # rows that a position sees at most
    scale,  # of a stored key
    value_scale,
    masses,  # [splits, 2, S, Hq] fp32: gone, kept
    sums,  # [splits, 2, S, Hq, D] fp32
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
    KEY_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One side, gone or kept, of one block of positions, one KV head and one equal share of its tiles: one partial.

    The products keep fp32's digits of a and of v - centre: each is three in tf32. Both sides in one program would not
    fit into registers; side by side, they meet in L2 over the rows they read.
    Floor: reads K and V, 2 Hkv T D elements; 4 Hq T D M FLOPs for the logits and 12 in tf32 for the sums. 32 query and
    8 KV heads, D 128, 64k tokens, bf16, on an H200: 268 MB, 56 us; 16 positions: 17 GFLOP at 990 and 52 at 495
    TFLOP/s, 121 us. The products bind.
    """
    side, block, split = tl.program_id(0) % 2, tl.program_id(0) // 2 % blocks, tl.program_id(0) // (2 * blocks)
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets + sequence)
    positions = tl.load(offsets + sequence + 1) - first
    if block * BLOCK >= positions:
        return
    position, head, exists = block_rows(block, positions, kv_head, GROUP, PADDED_GROUP, BLOCK)
    pair = (first + position).to(tl.int64) * (KV_HEADS * GROUP) + head  # [R]
    column = tl.arange(0, WIDTH)
    mask = exists[:, None] & (column < D)[None, :]
    queries = tl.load(q + pair[:, None] * D + column[None, :], mask=mask, other=0.0).to(KEY_TYPE)
    total = tl.load(lse + pair, mask=exists, other=0.0)
    entry = sequence * KV_HEADS + kv_head
    middle = tl.load(centre + entry * D + column, mask=column < D, other=0.0)

    length = tl.load(lengths + sequence * length_sequence_stride + kv_head * length_head_stride)
    page_list = sequence * sequence_stride + kv_head * head_stride
    begin = tl.maximum(length - positions + 1 - window, 0) // TILE  # tiles before it are in nobody's window
    end = tl.cdiv(length, TILE)
    share = tl.cdiv(end - begin, tl.num_programs(0) // (2 * blocks))
    begin += split * share
    side_mass = tl.zeros([BLOCK * PADDED_GROUP], tl.float32)
    side_sum = tl.zeros([BLOCK * PADDED_GROUP, WIDTH], tl.float32)
    for tile in range(begin, tl.minimum(begin + share, end)):
        row = tile * TILE + tl.arange(0, TILE)
        held = row < length
        places = row_offsets(key_pages + page_list, row, held, kv_head, first_page, PAGE_HEADS, PAGE_SIZE, D)
        keys = load_rows(tl.load(addresses), places, held, D, WIDTH, CACHE, KEY_TYPE)
        places = row_offsets(value_pages + page_list, row, held, kv_head, first_page, PAGE_HEADS, PAGE_SIZE, D)
        values = load_rows(tl.load(addresses + 1), places, held, D, WIDTH, CACHE, tl.float32)
        values = values * value_scale - middle[None, :]
        marked = row < tl.minimum(length, longest)
        leaves = tl.load(evict + entry.to(tl.int64) * longest + row, mask=marked, other=0) != 0
        seen = sees(row, position, length, positions, window) & exists[None, :] & (leaves != (side == 1))[:, None]
        a = attention(keys, queries, total, seen, scale, SOFTCAP)
        side_mass += tl.sum(a, axis=0)
        side_sum = tl.dot(tl.trans(a), values, side_sum, input_precision="tf32x3")

    place = (split.to(tl.int64) * 2 + side) * rows * (KV_HEADS * GROUP) + pair
    tl.store(masses + place, side_mass, mask=exists)
    tl.store(sums + place[:, None] * D + column[None, :], side_sum, mask=mask)


@triton.jit
def nominate_entries(
    q,  # [S, Hq, D]
    evict,  # [B, Hkv, longest] uint8
    centre,  # [B, Hkv, D] fp32
    mass,  # [S, Hq] fp32
    context_slope,  # [S, Hq] fp32, (c' - centre).slope
    slopes,  # [S, Hq, D] fp32
    least,  # [B, Hkv] fp32
    offsets,  # [B + 1] int32
    addresses,  # [2] int64
    key_pages,  # [B, Hkv or 1, P] int32
    value_pages,
    lengths,  # [B, Hkv] int32
    lse,  # [S, Hq] fp32
    longest,
    sequence_stride,  # of the page lists
    head_stride,
    length_sequence_stride,
    length_head_stride,
    first_page,
    window,  # rows that a position sees at most
    scale,  # of a stored key
    value_scale,
    first_order,  # [B, Hkv, longest] fp32
    admissible,  # [B, Hkv, longest] uint8
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
    KEY_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,  # of a row
):
    """One tile of entries of one KV head, against all positions of its sequence.

    Floor: reads K and V, 2 Hkv T D elements; 2 Hq T D M FLOPs for the logits and 6 in tf32 for the slopes. 32 query and
    8 KV heads, D 128, 64k tokens, bf16, on an H200: 268 MB, 56 us; 16 positions: 9 GFLOP at 990 and 26 at 495 TFLOP/s,
    61 us. The products bind, just.
    """
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    entry = sequence * KV_HEADS + kv_head
    length = tl.load(lengths + sequence * length_sequence_stride + kv_head * length_head_stride)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.load(offsets + sequence)
    positions = tl.load(offsets + sequence + 1) - first
    if (tl.program_id(0) * TILE >= length) | (positions == 0):
        return
    held = row < tl.minimum(length, longest)
    place = entry.to(tl.int64) * longest + row
    sign = tl.where(tl.load(evict + place, mask=held, other=0) != 0, 1.0, -1.0)  # it comes back, or leaves too
    floor = tl.load(least + entry)
    column = tl.arange(0, WIDTH)
    page_list = sequence * sequence_stride + kv_head * head_stride
    key_places = row_offsets(key_pages + page_list, row, held, kv_head, first_page, PAGE_HEADS, PAGE_SIZE, D)
    keys = load_rows(tl.load(addresses), key_places, held, D, WIDTH, CACHE, KEY_TYPE)
    value_places = row_offsets(value_pages + page_list, row, held, kv_head, first_page, PAGE_HEADS, PAGE_SIZE, D)
    value_address = tl.load(addresses + 1)

    cost = tl.zeros([TILE], tl.float32)
    stable = held
    for block in range(tl.cdiv(positions, BLOCK)):
        position, head, exists = block_rows(block, positions, kv_head, GROUP, PADDED_GROUP, BLOCK)
        pair = (first + position).to(tl.int64) * (KV_HEADS * GROUP) + head  # [R]
        mask = exists[:, None] & (column < D)[None, :]
        queries = tl.load(q + pair[:, None] * D + column[None, :], mask=mask, other=0.0).to(KEY_TYPE)
        total = tl.load(lse + pair, mask=exists, other=0.0)
        seen = sees(row, position, length, positions, window) & exists[None, :]
        a = attention(keys, queries, total, seen, scale, SOFTCAP)
        read = tl.load(context_slope + pair, mask=exists, other=0.0)
        away = tl.zeros([TILE, BLOCK * PADDED_GROUP], tl.float32) + read[None, :]
        for begin in range(0, WIDTH, PART):  # whole rows of values and slopes, each in two parts, do not fit
            part = begin + tl.arange(0, PART)
            values = load_rows(value_address, value_places + begin, held, D - begin, PART, CACHE, tl.float32)
            middle = tl.load(centre + entry * D + part, mask=part < D, other=0.0)
            slope_mask = exists[:, None] & (part < D)[None, :]
            slope = tl.load(slopes + pair[:, None] * D + part[None, :], mask=slope_mask, other=0.0)
            values = middle[None, :] - values * value_scale
            away = tl.dot(values, tl.trans(slope), away, input_precision="tf32x3")  # (c' - v).slope [T, R]
        retained = tl.load(mass + pair, mask=exists, other=INFINITY)  # what does not exist loses nothing
        left = retained[None, :] + sign[:, None] * a
        stable = stable & (tl.sum((left >= floor).to(tl.int32), axis=1) == BLOCK * PADDED_GROUP)
        cost += tl.sum(a / left * away, axis=1)
    tl.store(first_order + place, cost, mask=held)
    tl.store(admissible + place, stable.to(tl.uint8), mask=held)
