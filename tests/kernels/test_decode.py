"""Decode attention against plain softmax attention in float64, over caches poisoned wherever nothing may be read."""

from dataclasses import replace

import pytest
import torch

from bpkv_trt.kernels.decode import MAX_SPLITS, ROWS_PER_SPLIT, TILE, paged_decode_attention, split_count
from tests.kernels.paged_caches import laid_out, random_rows

RAGGED = [[2 * TILE + 5, 1], [TILE, 37]]  # more than two tiles, one row, one whole tile


def truth(q, keys, values, cache, scale, softcap=None, window=None):
    """(context [B, Hq, D], lse [B, Hq]) in float64."""
    group = q.shape[1] // cache.kv_heads
    context, lse = torch.empty(q.shape, dtype=torch.float64), torch.empty(q.shape[:2], dtype=torch.float64)
    for sequence in range(cache.sequences):
        for head in range(cache.kv_heads):
            k = keys[sequence][head].double() * cache.key_scale
            v = values[sequence][head].double() * cache.value_scale
            first = 0 if window is None else max(0, len(k) - window)
            own = slice(head * group, (head + 1) * group)
            logits = scale * q[sequence, own].double() @ k[first:].T
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            context[sequence, own] = logits.softmax(-1) @ v[first:]
            lse[sequence, own] = logits.logsumexp(-1)
    return context, lse


def check(device, lengths=RAGGED, dtype=torch.float32, head_dim=16, group=2, q_dtype=None, layout=None, **options):
    """Compare on random rows, to what fp32 sums and the rounding of the result leave."""
    keys, values = (random_rows(lengths, dtype, head_dim) for _ in range(2))
    laid = laid_out(keys, values, device, **(layout or {}))
    cache = laid.cache
    q = torch.randn(len(lengths), len(lengths[0]) * group, head_dim).to(q_dtype or torch.float32)
    scale = 2 / head_dim**0.5 / keys[0][0].float().std().item() / cache.key_scale  # attention that is not even
    context, lse = paged_decode_attention(q.to(device), cache, scale=scale, **options)
    options.pop("splits", None)
    expected, expected_lse = truth(q, keys, values, cache, scale, **options)
    assert context.dtype == q.dtype and lse.dtype == torch.float32
    rounding = torch.finfo(q.dtype).eps if q.dtype != torch.float32 else 2e-6
    size = max(each.float().abs().max().item() for head in values for each in head) * cache.value_scale
    torch.testing.assert_close(context.cpu().double(), expected, rtol=rounding, atol=rounding * size)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("shared_pages", [False, True])
@pytest.mark.parametrize(
    "dtype, q_dtype",
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float16),
        (torch.int8, torch.bfloat16),
    ],
    ids=str,
)
def test_attention_over_every_cache(device, dtype, q_dtype, shared_pages):
    layout = {"shared_pages": shared_pages, "key_scale": 0.5, "value_scale": 0.25}
    check(device, dtype=dtype, q_dtype=q_dtype, layout=layout, splits=2)


@pytest.mark.parametrize("head_dim, page_size, group", [(64, 64, 1), (96, 32, 3), (128, 128, 4), (256, 16, 20)])
def test_attention_in_every_shape(device, head_dim, page_size, group):
    check(device, [[TILE + 9]], head_dim=head_dim, group=group, layout={"page_size": page_size})


@pytest.mark.parametrize("splits", [1, 3, 5])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"window": 70}, {"window": 1}, {"window": 10**9}], ids=str)
def test_the_result_is_that_of_one_softmax_however_it_is_split(device, splits, options):
    check(device, splits=splits, **options)


def test_a_nan_that_is_seen_comes_through_and_one_that_is_not_does_not(device):
    rows = random_rows([[100, 100]], torch.float32, 16)
    rows[0][1][3] = torch.nan
    laid = laid_out(rows, rows, device)
    q = torch.randn(1, 2, 16, device=device)
    for window, seen in ((None, True), (97, True), (96, False)):
        context, lse = paged_decode_attention(q, laid.cache, scale=1.0, window=window, splits=2)
        assert not context[0, 0].isnan().any() and not lse[0, 0].isnan()
        assert context[0, 1].isnan().all() == lse[0, 1].isnan() == seen


def test_a_head_without_rows_has_no_attention(device):
    rows = random_rows([[20, 30]], torch.float32, 16)
    laid = laid_out(rows, rows, device)
    empty = replace(laid.cache, lengths=torch.tensor([[20, 0]], dtype=torch.int32, device=device))
    context, lse = paged_decode_attention(torch.randn(1, 2, 16, device=device), empty, scale=1.0, splits=2)
    assert context[0, 0].all() and lse[0, 0].isfinite()
    assert not context[0, 1].any() and lse[0, 1] == -torch.inf


def test_splits_fill_the_machine_once():
    assert split_count(8, 128 * 1024, 132) == 33  # two programs on each multiprocessor
    assert split_count(8 * 64, 128 * 1024, 132) == 1  # the batch fills it
    assert split_count(8, 3 * ROWS_PER_SPLIT + 1, 132) == 3
    assert split_count(8, 1, 132) == 1
    assert split_count(1, 10**6, 132) == MAX_SPLITS


def test_arguments_that_do_not_fit_are_refused(device):
    held = random_rows([[20, 30]], torch.bfloat16, 16)
    cache = laid_out(held, held, device).cache
    q = torch.randn(1, 4, 16, device=device)
    with pytest.raises(TypeError, match="q is torch.float64; expected torch.float32"):
        paged_decode_attention(q.double(), cache, scale=1.0)
    with pytest.raises(TypeError, match="would be rounded to be multiplied with torch.float16"):
        paged_decode_attention(q.half(), cache, scale=1.0)
    with pytest.raises(ValueError, match=r"q has shape \(1, 4, 8\); expected \(1, any, 16\)"):
        paged_decode_attention(q[..., :8], cache, scale=1.0)
    with pytest.raises(ValueError, match="q has strides"):
        paged_decode_attention(q.transpose(1, 2).contiguous().transpose(1, 2), cache, scale=1.0)
    for heads in (0, 3, 130):
        with pytest.raises(ValueError, match=f"q has {heads} heads; expected a multiple of .* 2, 1 to 64 times"):
            paged_decode_attention(torch.zeros(1, heads, 16, device=device), cache, scale=1.0)
    for name, wrong in (
        ("softcap", 0.0),
        ("window", 0),
        ("splits", 0),
        ("splits", MAX_SPLITS + 1),
        ("scale", torch.nan),
    ):
        with pytest.raises(ValueError, match=f"{name} is {wrong}; expected"):
            paged_decode_attention(q, cache, **{"scale": 1.0, name: wrong})
    with pytest.raises(TypeError, match="splits is a float; expected an int"):
        paged_decode_attention(q, cache, scale=1.0, splits=2.0)
