"""Random masks of the entries that may go, of the kinds that estimates are held to."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bpkv_trt.core.traits import ModelTraits

# A mask of shape [L, Hkv, T], within some layers and rows.
MaskKind = Callable[[tuple[int, int, int], Sequence[int], slice, torch.Generator], Tensor]

SHORTEST, LONGEST = 8, 32  # rows of a block


def masks_of(
    kind: MaskKind, traits: ModelTraits, tokens: int, count: int, seed: int, *, sinks: int = 4, recent: int = 32
) -> Iterator[Tensor]:
    """`count` masks over the rows of a sequence that are neither sinks nor recent."""
    generator = torch.Generator().manual_seed(seed)
    shape, rows = (traits.layers, traits.kv_heads, tokens), slice(sinks, tokens - recent)
    for _ in range(count):
        yield kind(shape, traits.compactable_layers, rows, generator)


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


def half_of_a_layer(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator
) -> Tensor:
    """Half of the entries of one layer within `rows`, at random: every mask is of the same size."""
    return _random_share(shape, [_pick(layers, generator)], rows, 0.5, generator)


def block_of_heads(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator
) -> Tensor:
    """A tenth of the rows, side by side, in one KV head of one layer: every mask is of the same size."""
    mask = torch.zeros(shape, dtype=torch.bool)
    width = (rows.stop - rows.start) // 10
    first = rows.start + int(torch.randint(rows.stop - rows.start - width + 1, (), generator=generator))
    mask[_pick(layers, generator), _pick(range(shape[1]), generator), first : first + width] = True
    return mask


def scattered(shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator) -> Tensor:
    """Half of all entries within `rows`, at random over all layers: of one size, without structure."""
    return _random_share(shape, layers, rows, 0.5, generator)


def scattered_of_mixed_size(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator
) -> Tensor:
    """From a twentieth to nearly all entries within `rows`, at random over all layers."""
    share = 0.05 + 0.9 * float(torch.rand((), generator=generator))
    return _random_share(shape, layers, rows, share, generator)


def _lowest(rank: Tensor, count: int, shape: tuple[int, int, int], layers: Sequence[int], rows: slice) -> Tensor:
    # rank [layers, Hkv, rows] -> mask [L, Hkv, T] of the `count` lowest; of equals the first in their head.
    drawn = torch.zeros(rank.numel(), dtype=torch.bool)
    drawn[rank.flatten().argsort(stable=True)[:count]] = True
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[list(layers), :, rows] = drawn.view(rank.shape)
    return mask


def _pick(choices: Sequence[int], generator: torch.Generator) -> int:
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def _random_share(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, share: float, generator: torch.Generator
) -> Tensor:
    size = (len(layers), shape[1], rows.stop - rows.start)
    drawn = torch.zeros(size, dtype=torch.bool).flatten()
    drawn[torch.randperm(drawn.numel(), generator=generator)[: int(share * drawn.numel())]] = True
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[list(layers), :, rows] = drawn.view(size)
    return mask
