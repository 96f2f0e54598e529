"""Attention of one new token per sequence over a paged cache whose heads may hold different counts of rows."""

import torch
from torch import Tensor

from bpkv_trt.kernels.arguments import expect_int
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.launch import launch
from bpkv_trt.kernels.lse import attention_logits, expect_queries
from bpkv_trt.kernels.paged import PagedCache, load_rows, row_offsets, tile_rows
from bpkv_trt.kernels.rounding import next_power_of_2

TILE = 64  # rows of K at a time, at most: with V, and both while the next ones come, 64 KiB, which every target has
ROWS_PER_SPLIT = 4 * TILE  # at least: with less, reading what the others found costs as much as the rows
MAX_SPLITS = 128  # what the combining kernel holds in registers
RESIDENT = 2  # programs on a multiprocessor at a time


def paged_decode_attention(
    q: Tensor,
    cache: PagedCache,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q K^T) V of one query per sequence, and the log of the softmax's denominator.

    q [B, Hq, D] post-RoPE, fp32, fp16 or bf16; query heads h G .. h G + G - 1 belong to KV head h. A head sees all its
    rows, with `window` the last so many; `softcap` c makes a logit x to c tanh(x / c). Returns context [B, Hq, D] of
    q's type and lse [B, Hq] fp32, in nats. A head without rows, which no pool plans, gets context 0 and lse -inf.

    Each head's rows are shared out among `splits` programs, by default as `split_count` says, and their results
    combined. Sums are fp32; attention weights are rounded to the type of the product. Runs on the current device.
    Raises TypeError or ValueError, before any launch, where an argument does not fit. Lengths within the page lists are
    the caller's to provide: values on the device are not read back to be checked.
    """
    expect_queries(q, None, cache, scale, softcap, window)
    if splits is not None:
        expect_int("splits", splits, 1, MAX_SPLITS)
    batch, heads, width = q.shape
    if splits is None:
        splits = split_count(batch * cache.kv_heads, cache.capacity, multiprocessors(q.device))
    group = heads // cache.kv_heads
    padded_width = next_power_of_2(width)
    partial_context = torch.empty(batch, heads, splits, width, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    context, lse = torch.empty_like(q), torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    launch(
        attend_split,
        (splits, cache.kv_heads, batch),
        q,
        cache.addresses,
        cache.key_pages,
        cache.value_pages,
        cache.lengths,
        *cache.list_strides,
        *cache.length_strides,
        cache.first_page,
        cache.capacity if window is None else window,
        scale * cache.key_scale,
        partial_context,
        partial_lse,
        GROUP=group,
        ROWS=max(16, next_power_of_2(group)),
        **cache.constants,
        TYPE=cache.type.operand(q.dtype),
        SOFTCAP=softcap,
        TILE=tile_rows(TILE, width, q.dtype),
        warps=4,
        stages=3,  # page numbers, then rows, then products
    )
    launch(
        combine_splits,
        (batch * heads,),
        partial_context,
        partial_lse,
        splits,
        cache.value_scale,
        context,
        lse,
        D=width,
        WIDTH=padded_width,
        SPLITS=next_power_of_2(splits),
        warps=8,
    )
    return context, lse


def split_count(heads: int, longest: int, multiprocessors: int) -> int:
    """Programs that share the rows of each of `heads` (sequence, KV head) pairs, the longest of `longest` rows.

    As many as run at the same time on all multiprocessors, so that no second wave runs nearly empty, while each has
    ROWS_PER_SPLIT rows.
    """
    return max(1, min(RESIDENT * multiprocessors // heads, longest // ROWS_PER_SPLIT, MAX_SPLITS))


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def attend_split(
    q,  # *[B, Hq, D]
    addresses,  # *i64 [2]
    key_pages,  # *i32 [B, Hkv or 1, P]
    value_pages,  # *i32 of the same strides
    lengths,  # *i32 [B, Hkv]
    sequence_stride,  # of the page lists
    head_stride,
    length_sequence_stride,
    length_head_stride,
    first_page,
    window,
    scale,  # fp32, of the stored keys
    contexts,  # *f32 [B, Hq, splits, D]
    lses,  # *f32 [B, Hq, splits]
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded to what a tensor core takes
    PAGE_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
    TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # None: none
    TILE: tl.constexpr,
):
    """Grid (splits, Hkv, B): one share of one head's rows, read once for its G query heads.

    Floor, per layer: 4 Hq T D FLOPs and 2 Hkv T D cached numbers. Llama-3.1-8B, 64k tokens in bf16, on an H200: 268 MB
    are 56 us; 1.1 GFLOP, 4.3 with 4 rows padded to 16, are 4 us. Bytes bind.
    """
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, heads = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(lengths + sequence * length_sequence_stride + head * length_head_stride)
    in_sight = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - in_sight, TILE), splits) * TILE
    begin = in_sight + split * share
    end = tl.minimum(begin + share, length)
    pages = sequence * sequence_stride + head * head_stride
    key_address, value_address = tl.load(addresses), tl.load(addresses + 1)

    member, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query_head = (sequence * heads + head) * GROUP + member
    own = member < GROUP
    wide = own[None, :] & (column < D)[:, None]
    queries = tl.load(q + query_head[:, None] * D + column[None, :], mask=tl.trans(wide), other=0.0).to(TYPE)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([WIDTH, ROWS], tl.float32)
    for start in range(begin, end, TILE):
        rows = start + tl.arange(0, TILE)
        held = rows < end
        places = row_offsets(key_pages + pages, rows, held, head, first_page, PAGE_HEADS, PAGE_SIZE, D)
        keys = load_rows(key_address, places, held, D, WIDTH, CACHE, TYPE)
        logits = tl.where(held[:, None], attention_logits(keys, queries, scale, SOFTCAP), float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 0))
        weights = tl.exp(logits - highest[None, :])
        decay = tl.exp(top - highest)
        top, total = highest, total * decay + tl.sum(weights, 0)
        places = row_offsets(value_pages + pages, rows, held, head, first_page, PAGE_HEADS, PAGE_SIZE, D)
        values = load_rows(value_address, places, held, D, WIDTH, CACHE, TYPE)
        context = context * decay[None, :] + tl.dot(tl.trans(values), weights.to(TYPE), input_precision="tf32x3")

    total = tl.where(total == 0, 1.0, total)  # no rows: context 0, lse -inf
    place = query_head * splits + split
    tl.store(contexts + place[None, :] * D + column[:, None], context / total[None, :], mask=wide)
    tl.store(lses + place, top + tl.log(total), mask=own)


@triton.jit
def combine_splits(
    contexts,  # *f32 [B, Hq, splits, D]
    lses,  # *f32 [B, Hq, splits]
    splits,
    value_scale,  # fp32, of the stored values
    context,  # *[B, Hq, D]
    lse,  # *f32 [B, Hq]
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # splits, or the next power of two
):
    """Grid (B Hq,): the attention over all splits from that over each, c = sum_i e^(lse_i - lse) c_i.

    Floor: 4 Hq splits D bytes; Llama-3.1-8B, 33 splits: 0.5 MB, 0.1 us. The launch binds.
    """
    head = tl.program_id(0)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    wanted = split < splits
    logs = tl.load(lses + head * splits + split, mask=wanted, other=float("-inf"))
    highest = tl.max(logs, 0)
    weights = tl.exp(logs - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    total = tl.where(total == 0, 1.0, total)  # no rows: context 0, lse -inf
    wide = wanted[:, None] & (column < D)[None, :]
    parts = tl.load(contexts + (head * splits + split)[:, None] * D + column[None, :], mask=wide, other=0.0)
    combined = tl.sum(parts * weights[:, None], 0) / total * value_scale
    tl.store(context + head * D + column, combined.to(context.dtype.element_ty), mask=column < D)
    tl.store(lse + head, highest + tl.log(total))
