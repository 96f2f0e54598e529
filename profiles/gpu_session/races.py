"""Compaction in place, again and again on random plans: a race shows in bytes that differ from a copy packed by torch.

Triton's interpreter runs one program after the other and shows none.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.paged import CacheType, PagedCache
from profiles.gpu_session.part import Record, Session, run_part

PAGE = 32
RESERVE = 12.0  # seconds of the part's cap for imports and what is compiled


@dataclass(frozen=True)
class Size:
    """A cache of `heads` heads, each of `rows` rows of `width` numbers."""

    heads: int
    rows: int
    width: int
    dtype: torch.dtype


SIZES = (
    Size(256, 8192, 128, torch.bfloat16),
    Size(16, 131072, 128, torch.bfloat16),
    Size(128, 4096, 64, torch.float8_e4m3fn),
    Size(64, 8192, 256, torch.float32),
    Size(2048, 700, 128, torch.float16),
)
TINY = (Size(3, 300, 16, torch.bfloat16),)


class Heads:
    """Pages of all heads in random order over random bytes, and a copy to start from again."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        pages = -(-size.rows // PAGE)
        self.table = torch.randperm(size.heads * pages, device=device).view(1, size.heads, pages).int()
        shape = (size.heads * pages, PAGE, size.width)
        self.fresh = [_random_bytes(shape, size.dtype, device) for _ in range(2)]
        self.fresh.append(torch.arange(size.heads * pages * PAGE, dtype=torch.int32, device=device).view(-1, PAGE))
        self.memory = [each.clone() for each in self.fresh]
        lengths = torch.full((1, size.heads), size.rows, dtype=torch.int32, device=device)
        addresses = torch.tensor([each.data_ptr() for each in self.memory[:2]], device=device)
        self.cache = PagedCache(addresses, self.table, self.table, lengths, CacheType.of(size.dtype), PAGE, size.width)

    def flat(self, head: Tensor, row: Tensor) -> Tensor:
        """Where rows of heads lie, counted in rows of the memory."""
        return self.table[0, head, row // PAGE].long() * PAGE + row % PAGE

    def wrong_rows(self, kept: Tensor) -> int:
        """Compact to the rows of kept [heads, rows] bool, which keep one of every head; how many rows came out wrong.

        Rows behind the kept ones count too: nothing may touch them.
        """
        for memory, fresh in zip(self.memory, self.fresh, strict=True):
            memory.copy_(fresh)
        head, row = kept.nonzero(as_tuple=True)
        counts = kept.sum(1)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        compact(row.int(), offsets, self.cache, self.memory[2])
        source = self.flat(head, row)
        target = self.flat(head, torch.arange(len(row), device=row.device) - offsets[head])
        wrong = 0
        for memory, fresh in zip(self.memory, self.fresh, strict=True):
            expected = _rows(fresh).clone()
            expected[target] = _rows(fresh)[source]
            wrong += int((_rows(memory) != expected).any(-1).sum())
        return wrong


def _random_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    memory = torch.empty(shape, dtype=dtype, device=device)
    memory.view(torch.uint8).random_(0, 256)
    return memory


def _rows(memory: Tensor) -> Tensor:
    # [n, words] of rows in pages: floats would differ from themselves where they are NaN
    return memory.view(torch.int32).flatten(0, 1) if memory.dim() == 3 else memory.view(-1, 1)


def told(size: Size) -> str:
    """A size in a few words."""
    return f"{size.heads} heads of {size.rows} rows, {size.width} x {str(size.dtype).removeprefix('torch.')}"


def random_plan(heads: int, rows: int, device: torch.device) -> Tensor:
    """[heads, rows] bool: some share of the rows; by chance behind a front that stays or goes, or in long runs."""
    share, edge, kind = torch.rand(3).tolist()
    kept = torch.rand(heads, rows, device=device) < share
    front = torch.arange(rows, device=device) < edge * rows
    if kind < 0.25:
        kept |= front
    elif kind < 0.5:
        kept &= ~front
    elif kind < 0.75:
        kept = kept[:, torch.arange(rows, device=device) // 37]
    kept[:, -1] = True
    return kept


def measure(session: Session) -> Iterator[Record]:
    torch.manual_seed(session.seed)
    sizes = TINY if session.tiny else SIZES
    seconds = 1.0 if session.tiny else (session.seconds - RESERVE) / len(sizes)
    for size in sizes:
        heads, repeats, wrong = Heads(size, session.device), 0, 0
        end = time.monotonic() + seconds
        while repeats == 0 or time.monotonic() < end:
            wrong += heads.wrong_rows(random_plan(size.heads, size.rows, session.device))
            repeats += 1
        yield {"check": "compact, rows that differ", "case": told(size), "repeats": repeats, "error": float(wrong),
               "tolerance": 0.0, "passed": wrong == 0}  # fmt: skip


if __name__ == "__main__":
    run_part(measure)
