"""Random masks of a fixed size: with structure, and without. Both are `estimate.MaskKind`s."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bpkv_trt.evaluation.estimate import MaskKind

SHORTEST, LONGEST = 8, 32  # rows of a block


def in_blocks(count: int) -> MaskKind:
    """`count` entries in runs of 8 to 32 rows, other ones in every head, most of them in some of the layers.

    Every block has the rank of its layer, drawn from [0, 1), plus a number of its own from [0, 1); the lowest go, the
    last one in part.
    """

    def draw(shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator) -> Tensor:
        heads, width = (len(layers), shape[1]), rows.stop - rows.start
        lengths = torch.randint(SHORTEST, LONGEST + 1, (*heads, width // SHORTEST + 1), generator=generator)
        block = torch.searchsorted(
            lengths.cumsum(-1), torch.arange(width).expand(*heads, width).contiguous(), right=True
        )
        rank = torch.rand(len(layers), 1, 1, generator=generator) + torch.rand(lengths.shape, generator=generator)
        return _lowest(rank.gather(-1, block), count, shape, layers, rows)

    return draw


def at_random(count: int) -> MaskKind:
    """`count` entries, each as likely as any other."""

    def draw(shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator) -> Tensor:
        rank = torch.rand(len(layers), shape[1], rows.stop - rows.start, generator=generator)
        return _lowest(rank, count, shape, layers, rows)

    return draw


def _lowest(rank: Tensor, count: int, shape: tuple[int, int, int], layers: Sequence[int], rows: slice) -> Tensor:
    # rank [layers, Hkv, rows] -> mask [L, Hkv, T] of the `count` lowest; of equals the first in their head.
    drawn = torch.zeros(rank.numel(), dtype=torch.bool)
    drawn[rank.flatten().argsort(stable=True)[:count]] = True
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[list(layers), :, rows] = drawn.view(rank.shape)
    return mask
