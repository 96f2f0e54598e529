"""How a kernel finds the rows of a cache: in pages of one head, or in blocks that all KV heads of a layer share."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.kernels.arguments import expect, expect_finite, expect_int
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.rounding import next_power_of_2

ROW_BYTES = 16  # rows begin at multiples of it: kernels load so much at a time


class CacheType(Enum):
    """What a row is made of, as kernels name it."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8e4m3"
    INT8 = "int8"

    @classmethod
    def of(cls, dtype: torch.dtype) -> "CacheType":
        """Raises TypeError where kernels read no such cache."""
        known = {
            torch.float32: cls.FP32,
            torch.float16: cls.FP16,
            torch.bfloat16: cls.BF16,
            torch.float8_e4m3fn: cls.FP8,
            torch.int8: cls.INT8,
        }
        if dtype not in known:
            raise TypeError(f"cache is {dtype}; kernels read {', '.join(str(each) for each in known)}.")
        return known[dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return {CacheType.FP32: 4, CacheType.FP16: 2, CacheType.BF16: 2}.get(self, 1)

    def operand(self, dtype: torch.dtype) -> "tl.dtype":
        """What rows become to be multiplied with a tensor of `dtype`: that type, as kernels name it.

        Raises TypeError where `dtype` would round a number of the cache.
        """
        types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
        rounded = {
            CacheType.FP32: (torch.float16, torch.bfloat16),
            CacheType.FP16: (torch.bfloat16,),
            CacheType.BF16: (torch.float16,),
        }
        if dtype not in types or dtype in rounded.get(self, ()):
            raise TypeError(f"Rows of a cache of {self.value} would be rounded to be multiplied with {dtype}.")
        return types[dtype]


@dataclass(frozen=True)
class PagedCache:
    """One layer of B sequences. Nothing is copied: kernels go from the tables to the memory that `addresses` name.

    With `shared_pages` a page is a block [Hkv, page_size, D] of TensorRT-LLM's pool, and all heads of a sequence have
    one list of them; without, a page [page_size, D] belongs to one head.

    Values on the device are the caller's to provide, and are not read back to be checked: addresses of memory that is
    there, at multiples of 16 bytes, lengths within the page lists, and page numbers within that memory.
    """

    addresses: Tensor  # [2] int64, on the device: where the first page of K, and of V, begins; multiples of 16 bytes
    key_pages: Tensor  # [B, Hkv, P] int32, [B, 1, P] with `shared_pages`; past a head's end anything
    value_pages: Tensor  # as key_pages, of the same strides; the same tensor where K and V have pools of their own
    lengths: Tensor  # [B, Hkv] int32 rows held, of any strides: one length for all heads of a sequence is expanded
    type: CacheType
    page_size: int
    head_dim: int
    first_page: int = 0  # added to every page number: a block table may be that of the pool's first layer
    shared_pages: bool = False
    key_scale: float = 1.0  # what a stored number is multiplied by
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError, as `expect`."""
        expect("lengths", self.lengths, (None, None), [torch.int32], None, contiguous=False)
        if not self.lengths.numel():
            raise ValueError(f"lengths has shape {tuple(self.lengths.shape)}; expected a sequence and a KV head.")
        expect("addresses", self.addresses, (2,), [torch.int64], self.device)
        lists = (self.sequences, 1 if self.shared_pages else self.kv_heads, None)
        for name, pages in (("key_pages", self.key_pages), ("value_pages", self.value_pages)):
            expect(name, pages, lists, [torch.int32], self.device, contiguous=False)
            if not pages[0, 0].is_contiguous():
                raise ValueError(f"{name} has strides {pages.stride()}; expected contiguous lists of pages.")
        if self.key_pages.shape != self.value_pages.shape or self.key_pages.stride() != self.value_pages.stride():
            raise ValueError("key_pages and value_pages differ in shape or strides; expected equal ones.")
        if not isinstance(self.type, CacheType):
            raise TypeError(f"type is a {type(self.type).__name__}; expected a CacheType.")
        expect_int("page_size", self.page_size, 1)
        expect_int("head_dim", self.head_dim, 1)
        expect_int("first_page", self.first_page, 0, 2**31 - 1)
        expect_finite("key_scale", self.key_scale)
        expect_finite("value_scale", self.value_scale)

    @property
    def sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.lengths.shape[1]

    @property
    def capacity(self) -> int:
        """Rows that fit into the longest page list: known without reading the lengths from the device."""
        return self.key_pages.shape[2] * self.page_size

    @property
    def page_heads(self) -> int:
        return self.kv_heads if self.shared_pages else 1

    @property
    def list_strides(self) -> tuple[int, int]:
        """From the page list of one sequence, and of one KV head, to the next: 0 for heads that share one."""
        sequence, head, _ = self.key_pages.stride()
        return sequence, 0 if self.shared_pages else head

    @property
    def length_strides(self) -> tuple[int, int]:
        """From the length of one sequence, and of one KV head, to the next."""
        sequence, head = self.lengths.stride()
        return sequence, head

    @property
    def constants(self) -> dict[str, Any]:
        """What every kernel that reads rows is compiled for."""
        return {
            "PAGE_HEADS": self.page_heads,
            "PAGE_SIZE": self.page_size,
            "D": self.head_dim,
            "WIDTH": next_power_of_2(self.head_dim),
            "CACHE": self.type.value,
        }

    @property
    def device(self) -> torch.device:
        return self.lengths.device


def tile_rows(most: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many rows a kernel takes at a time to multiply them with `dtype`: `most` up to 128 numbers of 16 bits.

    More would not fit into the registers of its warps: fewer rows if they are wider, and a quarter if they are fp32,
    of which each number is two in tf32. At least 16, which is what a product takes.
    """
    width = next_power_of_2(head_dim) * (4 if dtype == torch.float32 else 1)
    return max(16, min(most, most * 128 // width))


@triton.jit
def row_offsets(
    pages,  # *i32: the page list of one (sequence, head)
    rows,  # [T] int32
    held,  # [T] bool: other rows are never looked up
    head,  # KV head
    first_page,
    HEADS: tl.constexpr,  # heads in a page
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
):
    """[T] int64: the number, counted in elements from the pool's beginning, where each row begins."""
    page = tl.load(pages + rows // PAGE_SIZE, mask=held, other=0).to(tl.int64) + first_page
    place = head if HEADS > 1 else 0
    return ((page * HEADS + place) * PAGE_SIZE + rows % PAGE_SIZE) * D


@triton.jit
def load_rows(
    address,  # int64
    offsets,  # [T] int64
    held,  # [T] bool
    D,  # numbers from there to the row's end
    WIDTH: tl.constexpr,  # a power of two: D or the next above it, or fewer for a part of a row
    CACHE: tl.constexpr,  # value of a CacheType
    TYPE: tl.constexpr,  # of the result: fp32, fp16 or bf16, exact for every number that the cache can hold
):
    """[T, WIDTH] rows, unscaled; 0 for rows that are not held, and beyond D."""
    column = tl.arange(0, WIDTH)
    place = offsets[:, None] + column[None, :]
    wanted = held[:, None] & (column < D)[None, :]
    # One chain: the compiler also takes what follows a branch that returns.
    if CACHE == "fp8e4m3":
        rows = _from_e4m3(tl.load(pointer(address, tl.uint8) + place, mask=wanted, other=0))
    elif CACHE == "int8":
        rows = tl.load(pointer(address, tl.int8) + place, mask=wanted, other=0)
    elif CACHE == "fp32":
        rows = tl.load(pointer(address, tl.float32) + place, mask=wanted, other=0.0)
    elif CACHE == "fp16":
        rows = tl.load(pointer(address, tl.float16) + place, mask=wanted, other=0.0)
    else:
        tl.static_assert(CACHE == "bf16")
        rows = tl.load(pointer(address, tl.bfloat16) + place, mask=wanted, other=0.0)
    return rows.to(TYPE)


@triton.jit
def pointer(address, TYPE: tl.constexpr):
    # Without the hint rows are loaded element by element; given before the conversion it would be lost.
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _from_e4m3(bits):
    # By its bits, since Triton converts fp8 on some targets only and in the interpreter not at all: fp16 has the same
    # order of sign, exponent and mantissa, with a bias of 15 in place of 7.
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half)
