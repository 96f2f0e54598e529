from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from bpkv_trt.kernels.paged import CacheType, PagedCache, load_rows, row_offsets, tile_rows
from tests.kernels.paged_caches import laid_out, random_rows

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


@triton.jit
def gathered(
    address,
    pages,
    length,
    first_page,
    result,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
    TILE: tl.constexpr,
):
    row, column = tl.arange(0, TILE), tl.arange(0, WIDTH)
    held = row < length
    offsets = row_offsets(pages, row, held, HEAD, first_page, HEADS, PAGE_SIZE, D)
    rows = load_rows(tl.load(address), offsets, held, D, WIDTH, CACHE, tl.float32)
    tl.store(result + row[:, None] * WIDTH + column[None, :], rows)


def gather(cache, sequence, head, tile=64):
    """[tile, WIDTH] what a kernel loads of the keys of one head."""
    width = triton.next_power_of_2(cache.head_dim)
    result = torch.full((tile, width), 9.0, device=cache.device)
    pages = cache.key_pages[sequence, 0 if cache.shared_pages else head]
    heads, length = cache.kv_heads if cache.shared_pages else 1, int(cache.lengths[sequence, head])
    shape = (head, heads, cache.page_size, cache.head_dim, width, cache.type.value, tile)
    gathered[(1,)](cache.addresses, pages, length, cache.first_page, result, *shape)
    return result.cpu()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shared_pages", [False, True])
@pytest.mark.parametrize("head_dim, page_size", [(24, 4), (96, 32)])
def test_rows_are_found_and_nothing_else_is_read(device, dtype, shared_pages, head_dim, page_size):
    lengths = [[37, 5], [1, 64]]
    rows = random_rows(lengths, dtype, head_dim)
    laid = laid_out(rows, rows, device, page_size=page_size, shared_pages=shared_pages)
    for sequence, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expected = torch.zeros(64, triton.next_power_of_2(head_dim))
        expected[: lengths[sequence][head], :head_dim] = rows[sequence][head].float()
        assert torch.equal(gather(laid.cache, sequence, head), expected)


def test_every_number_of_e4m3_is_read(device):
    numbers = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    laid = laid_out([[numbers]], [[numbers]], device)
    torch.testing.assert_close(gather(laid.cache, 0, 0, 16), numbers.float(), rtol=0, atol=0, equal_nan=True)


def test_a_tile_has_fewer_rows_where_they_are_wide_or_fp32():
    rows = [tile_rows(64, width, torch.bfloat16) for width in (16, 128, 130, 256, 512)]
    assert rows == [64, 64, 32, 32, 16]
    assert [tile_rows(64, width, torch.float32) for width in (16, 64, 128, 256)] == [64, 32, 16, 16]


def test_a_cache_that_does_not_fit_together_is_refused(device):
    rows = random_rows([[20, 30], [5, 6]], torch.float16, 16)
    cache = laid_out(rows, rows, device).cache
    given = {name: getattr(cache, name) for name in PagedCache.__dataclass_fields__}
    with pytest.raises(TypeError, match="addresses is torch.int32"):
        PagedCache(**given | {"addresses": cache.addresses.int()})
    with pytest.raises(ValueError, match=r"key_pages has shape \(2, 2, 2\)"):
        PagedCache(**given | {"shared_pages": True})
    with pytest.raises(ValueError, match="differ in shape or strides"):
        PagedCache(**given | {"value_pages": cache.value_pages.clone()})
    with pytest.raises(ValueError, match="contiguous"):
        PagedCache(**given | {"key_pages": cache.key_pages.mT.contiguous().mT})


@pytest.mark.parametrize(
    "name, wrong, error, said",
    [
        ("lengths", None, TypeError, "lengths is a NoneType; expected a tensor"),
        (
            "lengths",
            torch.zeros(0, 2).int(),
            ValueError,
            r"has shape \(0, 2\); expected a sequence and a KV head",
        ),
        ("lengths", torch.zeros(2, 0).int(), ValueError, r"lengths has shape \(2, 0\)"),
        ("key_pages", [[[0]]], TypeError, "key_pages is a list; expected a tensor"),
        ("value_pages", torch.zeros(2).int(), ValueError, r"value_pages has shape \(2\,\); expected \(2, 2, any\)"),
        ("type", torch.float16, TypeError, "type is a dtype; expected a CacheType"),
        ("page_size", 0, ValueError, "page_size is 0; expected at least 1"),
        ("page_size", 16.0, TypeError, "page_size is a float; expected an int"),
        ("head_dim", 0, ValueError, "head_dim is 0"),
        ("head_dim", "16", TypeError, "head_dim is a str"),
        ("first_page", -1, ValueError, "first_page is -1; expected 0 to 2147483647"),
        ("first_page", 2**31, ValueError, "first_page is 2147483648"),
        ("key_scale", torch.nan, ValueError, "key_scale is nan; expected a finite number"),
        ("value_scale", None, TypeError, "value_scale is a NoneType; expected a number"),
    ],
)
def test_what_a_cache_cannot_be_made_of_is_refused(device, name, wrong, error, said):
    rows = random_rows([[20, 30], [5, 6]], torch.float16, 16)
    cache = laid_out(rows, rows, device).cache
    with pytest.raises(error, match=said):
        replace(cache, **{name: wrong.to(device) if isinstance(wrong, torch.Tensor) else wrong})


@pytest.mark.parametrize(
    "dtype, refused",
    [
        (torch.float32, [torch.float16, torch.bfloat16]),
        (torch.float16, [torch.bfloat16]),
        (torch.bfloat16, [torch.float16]),
        (torch.float8_e4m3fn, [torch.float64]),
        (torch.int8, [torch.int8]),
    ],
)
def test_no_cache_is_rounded_to_be_multiplied(dtype, refused):
    CacheType.of(dtype).operand(torch.float32)
    for other in refused:
        with pytest.raises(TypeError, match="rounded"):
            CacheType.of(dtype).operand(other)
    with pytest.raises(TypeError, match="kernels read"):
        CacheType.of(torch.float64)
