"""What evicting each entry alone would do to the next-token distribution: `core.deletion` from a paged cache."""

import torch
from torch import Tensor

from bpkv_trt.kernels.arguments import FLOATS, expect, expect_int
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.launch import launch
from bpkv_trt.kernels.lse import attention, expect_queries
from bpkv_trt.kernels.paged import PagedCache, load_rows, row_offsets, tile_rows
from bpkv_trt.kernels.positions import PositionBlocks, block_rows, sees
from bpkv_trt.kernels.rounding import ceil_div, next_power_of_2
from bpkv_trt.kernels.series import log1p, phi

TILE = 128  # entries of a program, at most: every readout row that it loads serves so many
CONTEXT_TILE = 32  # readout rows
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
OVERFLOW_LIMIT = tl.constexpr(80.0)  # fp32's e^x ends at 88


def singleton_scores(
    q: Tensor,
    context: Tensor,
    readout: Tensor,
    p: Tensor | None,
    weights: Tensor,
    offsets: Tensor,
    cache: PagedCache,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    positions: int,
    longest: int,
) -> Tensor:
    """The divergence that evicting each entry alone would cause. Returns [B, Hkv, longest] fp32, 0 past a head's end.

    q, offsets, scale, softcap, window and `positions` as in `log_sum_exp`, whose result `lse` [S, Hq] fp32 is;
    context [S, Hq, D] the attention output, best in fp32, since v is subtracted from it; readout G [S, C, Hq, D],
    centred; all three fp32, fp16 or bf16; weights [S] fp32, summing to 1 in each sequence; `longest` at least the
    longest length. With a = exp(logit - lse), w = a / (1 - a) and dz[m, c] the sum of w (G.context - G.v) over the
    query heads of the entry's KV head:

        p [S, C] fp32, rows summing to 1:  sum_m weights_m log1p(sum_c p_c phi(dz_c)),  phi(x) = e^x - 1 - x
        p None, C probes:                  sum_m weights_m 1/2 mean_c dz_c^2

    (What rounding the readout has undone of its centring is corrected in the first form.) dz above 80 counts as 80.
    An entry that is all of some attention (a == 1) scores the largest finite number. A NaN that an entry's score is
    made of makes it NaN. The error is about 1e-6 sqrt(s u) / (1 - a) for a score s whose terms would make u if
    G.context and G.v, of all heads, did not cancel: within 1e-5 of s in ordinary attention. Raises TypeError and
    ValueError for arguments that do not fit; offsets, lengths and a `longest` that covers them are the caller's to
    provide, as in `log_sum_exp`.
    """
    expect_queries(q, offsets, cache, scale, softcap, window)
    expect_int("longest", longest, 0)
    rows, heads, width = q.shape
    expect("context", context, (rows, heads, width), FLOATS, cache.device)
    expect("readout", readout, (rows, None, heads, width), FLOATS, cache.device)
    channels = readout.shape[1]
    if not channels:
        raise ValueError(f"readout has shape {tuple(readout.shape)}; expected at least 1 channel.")
    if p is not None:
        expect("p", p, (rows, channels), [torch.float32], cache.device)
    expect("weights", weights, (rows,), [torch.float32], cache.device)
    expect("lse", lse, (rows, heads), [torch.float32], cache.device)
    blocks = PositionBlocks(positions, heads // cache.kv_heads)
    scores = torch.empty(cache.sequences, cache.kv_heads, longest, dtype=torch.float32, device=q.device)
    if rows == 0 or longest == 0:
        return scores.zero_()
    context_read = torch.empty(rows, channels, heads, dtype=torch.float32, device=q.device)
    launch(
        read_context,
        (ceil_div(channels * heads, CONTEXT_TILE), rows),
        context,
        readout,
        context_read,
        HEADS=heads,
        CHANNELS=channels,
        D=width,
        WIDTH=next_power_of_2(width),
        TILE=CONTEXT_TILE,
        warps=4,
    )
    tile = tile_rows(TILE, width, torch.promote_types(q.dtype, readout.dtype))
    launch(
        score_entries,
        (ceil_div(longest, tile), cache.kv_heads, cache.sequences),
        q,
        readout,
        context_read,
        weights if p is None else p,
        weights,
        offsets,
        cache.addresses,
        cache.key_pages,
        cache.value_pages,
        cache.lengths,
        lse,
        *cache.list_strides,
        *cache.length_strides,
        cache.first_page,
        cache.capacity if window is None else window,
        longest,
        scale * cache.key_scale,
        cache.value_scale,
        scores,
        PROBES=p is None,
        CHANNELS=channels,
        KV_HEADS=cache.kv_heads,
        **blocks.constants,
        **cache.constants,
        KEY_TYPE=cache.type.operand(q.dtype),
        VALUE_TYPE=cache.type.operand(readout.dtype),
        SOFTCAP=softcap,
        TILE=tile,
        warps=8,
        stages=2,
    )
    return scores


@triton.jit
def read_context(
    context,  # [S, Hq, D]
    readout,  # [S, C, Hq, D]
    result,  # [S, C, Hq] fp32
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """G.context. Floor: reads G, S C Hq D elements: 4 MB, 1 us for 16 positions, 32 logits, 32 heads, D 128, bf16."""
    position = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)  # channel * HEADS + head
    column = tl.arange(0, WIDTH)
    exists = pair < CHANNELS * HEADS
    mask = exists[:, None] & (column < D)[None, :]
    places = (position * HEADS + pair % HEADS)[:, None] * D + column[None, :]
    contexts = tl.load(context + places, mask=mask, other=0.0).to(tl.float32)
    places = (position * CHANNELS * HEADS + pair)[:, None] * D + column[None, :]
    readouts = tl.load(readout + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + position * CHANNELS * HEADS + pair, tl.sum(contexts * readouts, axis=1), mask=exists)


@triton.jit
def score_entries(
    q,  # [S, Hq, D]
    readout,  # [S, C, Hq, D]
    context_read,  # [S, C, Hq] fp32
    p,  # [S, C] fp32; not read with PROBES
    weights,  # [S] fp32
    offsets,  # [B + 1] int32
    addresses,  # [2] int64
    key_pages,  # [B, Hkv or 1, P] int32
    value_pages,
    lengths,  # [B, Hkv] int32
    lse,  # [S, Hq] fp32
    sequence_stride,  # of the page lists
    head_stride,
    length_sequence_stride,
    length_head_stride,
    first_page,
    window,  # rows that a position sees at most
    longest,
    scale,  # of a stored key
    value_scale,
    scores,  # [B, Hkv, longest] fp32
    PROBES: tl.constexpr,
    CHANNELS: tl.constexpr,
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
    VALUE_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of entries of one KV head, against all positions of its sequence.

    Floor: 2 Hq T D M (1 + C) FLOPs; reads K and V, 2 Hkv T D elements. 32 query and 8 KV heads, D 128, 64k tokens,
    bf16: 268 MB, 56 us at 4.8 TB/s; 16 positions and 32 logits 283 GFLOP, 286 us at 990 TFLOP/s: the products bind.
    40 positions and one probe 43 GFLOP, 43 us: bandwidth binds. In fp32 every product is three in tf32 (495 TFLOP/s):
    1.7 ms.
    """
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence * length_sequence_stride + kv_head * length_head_stride)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.load(offsets + sequence)
    positions = tl.load(offsets + sequence + 1) - first
    place = (sequence * KV_HEADS + kv_head).to(tl.int64) * longest + row
    if (tl.program_id(0) * TILE >= length) | (positions == 0):
        tl.store(scores + place, tl.zeros([TILE], tl.float32), mask=row < longest)
        return
    held = row < length
    page_list = sequence * sequence_stride + kv_head * head_stride
    value_places = row_offsets(value_pages + page_list, row, held, kv_head, first_page, PAGE_HEADS, PAGE_SIZE, D)
    key_address = tl.load(addresses)
    values = load_rows(tl.load(addresses + 1), value_places, held, D, WIDTH, CACHE, VALUE_TYPE)

    # Only what is the same for a whole program is counted in int64.
    q += first.to(tl.int64) * (KV_HEADS * GROUP * D)
    lse += first.to(tl.int64) * (KV_HEADS * GROUP)
    readout += first.to(tl.int64) * (CHANNELS * KV_HEADS * GROUP * D)
    context_read += first.to(tl.int64) * (CHANNELS * KV_HEADS * GROUP)
    p += first.to(tl.int64) * CHANNELS
    weights += first
    column = tl.arange(0, WIDTH)
    score = tl.zeros([TILE], tl.float32)
    sole = tl.zeros([TILE], tl.int32)
    for block in range(tl.cdiv(positions, BLOCK)):
        position, head, exists = block_rows(block, positions, kv_head, GROUP, PADDED_GROUP, BLOCK)
        pair = position * (KV_HEADS * GROUP) + head  # [R]
        mask = exists[:, None] & (column < D)[None, :]
        queries = tl.load(q + pair[:, None] * D + column[None, :], mask=mask, other=0.0).to(KEY_TYPE)
        # Found anew for every block: across the channels the places would take registers.
        key_places = row_offsets(key_pages + page_list, row, held, kv_head, first_page, PAGE_HEADS, PAGE_SIZE, D)
        keys = load_rows(key_address, key_places, held, D, WIDTH, CACHE, KEY_TYPE)
        total = tl.load(lse + pair, mask=exists, other=0.0)
        seen = sees(row, position, length, positions, window) & exists[None, :]
        a = attention(keys, queries, total, seen, scale, SOFTCAP)
        alone = a >= 1
        sole = tl.maximum(sole, tl.max(alone.to(tl.int32), axis=1))
        w = tl.where(alone, 0.0, a) / tl.where(alone, 1.0, 1 - a)  # [T, R]

        member = block * BLOCK + tl.arange(0, BLOCK)  # [MB]
        present = member < positions
        measured = tl.zeros([TILE, BLOCK], tl.float32)
        mean = tl.zeros([TILE, BLOCK], tl.float32)
        first_channel = position * (CHANNELS * KV_HEADS * GROUP) + head  # [R]
        for channel in range(CHANNELS):
            row_of_g = channel * (KV_HEADS * GROUP) + first_channel
            g = tl.load(readout + row_of_g[:, None] * D + column[None, :], mask=mask, other=0.0).to(VALUE_TYPE)
            read = tl.load(context_read + row_of_g, mask=exists, other=0.0)
            away = read[None, :] - tl.dot(values, tl.trans(g), input_precision="tf32x3") * value_scale  # G.(c - v)
            shift = tl.sum(tl.reshape(w * away, (TILE, BLOCK, PADDED_GROUP)), axis=2)  # dz [T, MB]
            if PROBES:
                measured += shift * shift
            else:
                share = tl.load(p + member * CHANNELS + channel, mask=present, other=0.0)
                shift = tl.where(shift > OVERFLOW_LIMIT, OVERFLOW_LIMIT, shift)  # not `minimum`, which loses a NaN
                measured += share[None, :] * phi(shift)
                mean += share[None, :] * shift
        divergence = measured * (0.5 / CHANNELS) if PROBES else top_k_divergence(measured, mean)
        weight = tl.load(weights + member, mask=present, other=0.0)
        score += tl.sum(divergence * weight[None, :], axis=1)

    score = tl.where((sole > 0) & (score == score), LARGEST, score)  # a NaN stays
    tl.store(scores + place, tl.where(held, score, 0.0), mask=row < longest)


@triton.jit
def top_k_divergence(mean_phi, mean):
    """log sum p e^(x - m) from sum p phi(x) and m = sum p x: what rounding left of the centring is taken out exactly.

    It is log1p(e^-m (sum p phi(x) - phi(m))). Where m passes 1, shifts are in the hundreds, and no longer corrected.
    """
    mean = tl.where(mean > 1, 1.0, tl.where(mean < -1, -1.0, mean))
    return log1p(tl.exp(-mean) * (mean_phi - phi(mean)))
