"""Scoring positions as kernels take them: in blocks of a few positions with all query heads of one KV head."""

from dataclasses import dataclass
from typing import Any

from bpkv_trt.kernels.arguments import expect_int
from bpkv_trt.kernels.language import tl, triton
from bpkv_trt.kernels.rounding import next_power_of_2

BLOCK_ROWS = 64  # (position, query head) pairs in a block; the accumulators of more do not fit into registers
SMALLEST_BLOCK = 16  # what tl.dot takes


@dataclass(frozen=True)
class PositionBlocks:
    """How at most `positions` positions of a sequence, each with `group` query heads, are cut into equal blocks."""

    positions: int
    group: int
    rows: int = BLOCK_ROWS  # pairs in a block at most, unless one group is larger

    def __post_init__(self) -> None:
        expect_int("positions", self.positions, 1)

    @property
    def padded_group(self) -> int:
        return next_power_of_2(self.group)

    @property
    def size(self) -> int:
        """Positions in a block: a power of two."""
        wanted = max(next_power_of_2(self.positions), SMALLEST_BLOCK // self.padded_group)
        return min(wanted, max(1, self.rows // self.padded_group))

    @property
    def count(self) -> int:
        return -(-self.positions // self.size)

    @property
    def constants(self) -> dict[str, Any]:
        """What every kernel that goes through the blocks is compiled for."""
        return {"GROUP": self.group, "PADDED_GROUP": self.padded_group, "BLOCK": self.size}


@triton.jit
def block_rows(
    block,
    positions,  # of this sequence
    kv_head,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[R] position, [R] query head and [R] bool whether there is such a pair; R = BLOCK * PADDED_GROUP."""
    row = tl.arange(0, BLOCK * PADDED_GROUP)
    position = block * BLOCK + row // PADDED_GROUP
    place = row % PADDED_GROUP
    return position, kv_head * GROUP + place, (position < positions) & (place < GROUP)


@triton.jit
def sees(
    row,  # [T] of the cache
    position,  # [R]
    length,
    positions,  # of this sequence; the last of them owns the last row
    window,
):
    """[T, R] bool."""
    own = (length - positions + position)[None, :]
    return (row[:, None] <= own) & (row[:, None] > own - window)
