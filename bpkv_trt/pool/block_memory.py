"""The memory of one TensorRT-LLM pool: rows of all KV heads of all its layers in blocks, K before V."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.pool.rows import KeyValue

Integers = NDArray[np.integer]

NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
QUANTISED = (torch.float8_e4m3fn, torch.int8)
FP8_NAN = 0x7F  # as e4m3 has it


class BlockMemory:
    """Rows by (blocks of the sequence, row): row r is row r % tokens_per_block of the r // tokens_per_block-th block.

    Reading gives numbers: those of a quantised cache multiplied by their layer's scale, in fp32. Moving copies bytes.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype, scales: Sequence[float] | None) -> None:
        """rows [blocks, layers, 2, Hkv, tokens_per_block, D] of `dtype`, or torch.int8 whose bytes are such.

        scales: by layer of the pool, for a quantised cache; else None. Raises TypeError or ValueError for other memory.
        """
        if dtype not in NUMBERS or rows.dtype not in (dtype, torch.int8):
            raise TypeError(f"a pool of {rows.dtype} does not hold {dtype}; expected one of {NUMBERS}, FP8 as int8.")
        if rows.dim() != 6 or rows.shape[2] != 2 or not rows.is_contiguous():
            raise ValueError(
                f"a pool has shape {tuple(rows.shape)} and strides {rows.stride()}; expected "
                "[blocks, layers, 2, KV heads, tokens per block, head size], contiguous."
            )
        if (scales is None) == (dtype in QUANTISED) or (scales is not None and len(scales) != rows.shape[1]):
            raise ValueError(f"scales are {scales} for {rows.shape[1]} layers of {dtype}; INT8 and FP8 have one each.")
        self.blocks, self.layers, _, self.kv_heads, self.tokens_per_block, self.head_dim = rows.shape
        self.rows, self.dtype, self.scales = rows, dtype, scales
        self._stored = rows.view(torch.int8) if dtype in QUANTISED else rows  # indexed by their bytes, as any type is

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.rows.device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all its rows, in every layer and KV head of the pool."""
        return self.rows[0].nbytes

    def head(self, layer: int, head: int, blocks: Integers, length: int) -> KeyValue:
        """(k, v) [length, D] of one head, copied."""
        listed = self._uploaded(blocks)
        k, v = (self._stored[:, layer, side, head].index_select(0, listed).flatten(0, 1)[:length] for side in (0, 1))
        return self._numbers(k, layer), self._numbers(v, layer)

    def gather(self, layer: int, head: Integers, blocks: Integers, rows: Integers) -> KeyValue:
        """(k, v) [n, D] of rows `rows` of heads `head`, copied."""
        block, place = self._located(blocks, self._uploaded(rows))
        k, v = self._stored[:, layer][block, _sides(block), self._uploaded(head), place]
        return self._numbers(k, layer), self._numbers(v, layer)

    def pack(self, blocks: Integers, rows: Tensor) -> None:
        """Keep only `rows` [layers, Hkv, n] int64, ascending, of every head, packed to its front.

        Of each layer all are read before any is written. What lies behind them stays as it was.
        """
        targets = torch.arange(rows.shape[2], device=rows.device).expand(rows.shape[1:])
        source, target = self._located(blocks, rows), self._located(blocks, targets)
        head = torch.arange(self.kv_heads, device=rows.device)[:, None]
        for layer, (block, place) in enumerate(zip(*source, strict=True)):
            stored, sides = self._stored[:, layer], _sides(block)
            stored[target[0], sides, head, target[1]] = stored[block, sides, head, place]

    def poison(self, blocks: Integers, first: int = 0) -> None:
        """Make row `first` of these blocks, and all behind it, unusable: NaN in every layer and head."""
        assert self.dtype != torch.int8, "INT8 has no NaN"
        rows = np.arange(first, len(blocks) * self.tokens_per_block)
        block, place = self._located(blocks, self._uploaded(rows))
        self._stored[block, :, :, :, place] = FP8_NAN if self.dtype in QUANTISED else torch.nan

    def is_poisoned(self, rows: Tensor) -> bool:
        """Whether all numbers of `rows` [blocks, tokens_per_block] bool are NaN."""
        spoilt = self._stored.movedim(4, 1)[rows]
        return bool(spoilt.view(self.dtype).float().isnan().all())

    def _located(self, blocks: Integers, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(block, row in it) of rows of a sequence."""
        listed = self._uploaded(blocks)
        return listed[rows // self.tokens_per_block], rows % self.tokens_per_block

    def _numbers(self, stored: Tensor, layer: int) -> Tensor:
        return stored if self.scales is None else stored.view(self.dtype).float().mul_(self.scales[layer])

    def _uploaded(self, numbers: Integers) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The keys and values of one layer of a sequence at one moment; good until the sequence changes."""

    memory: BlockMemory
    layer: int  # counted within the pool
    blocks: Integers
    length: int

    @property
    def lengths(self) -> list[int]:
        """Rows per head."""
        return [self.length] * self.memory.kv_heads

    def head(self, head: int) -> KeyValue:
        """(k, v) [n, D] of one head, copied."""
        return self.memory.head(self.layer, head, self.blocks, self.length)


def _sides(index: Tensor) -> Tensor:
    """K and V, to be broadcast against `index`."""
    return torch.arange(2, device=index.device).view(2, *[1] * index.dim())
