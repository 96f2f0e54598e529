"""Zero-copy access to the rows of one layer of one sequence."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Where the pages of a layer's heads lie; stays valid while no page is added, moved or freed."""

    spans: tuple[tuple[tuple[int, int], ...], ...]  # per head: (first flat row, rows) of each run of pages, in order
    spacing: int | None  # flat rows from one head to the next, when each is one run and all are equally far apart

    @classmethod
    def of(cls, pages: NDArray[np.int32], page_size: int) -> "LayerLayout":
        """Read the layout of one layer off its page table [Hkv, P], padded with -1."""
        spans = tuple(_spans(head[head >= 0], page_size) for head in pages)
        return cls(spans, _spacing(spans))


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The keys and values of one layer at one moment. Views of the pool: good until the sequence changes."""

    keys: Tensor  # [pages * page_size, D]
    values: Tensor  # [pages * page_size, D]
    layout: LayerLayout
    lengths: list[int]  # rows per head

    @property
    def uniform(self) -> KeyValue | None:
        """(k, v), views [Hkv, n, D] of all heads; None when heads differ in length or do not lie equally spaced."""
        spacing, length = self.layout.spacing, self.lengths[0]
        if spacing is None or any(other != length for other in self.lengths):
            return None
        width = self.keys.shape[1]
        shape, strides = (len(self.lengths), length, width), (spacing * width, width, 1)
        offset = self.layout.spans[0][0][0] * width
        return self.keys.as_strided(shape, strides, offset), self.values.as_strided(shape, strides, offset)

    def runs(self, head: int) -> list[KeyValue]:
        """(k, v), views [r, D], for every maximal run of consecutive pages of a head, in order."""
        remaining, views = self.lengths[head], []
        for first, capacity in self.layout.spans[head]:
            end = first + min(capacity, remaining)
            views.append((self.keys[first:end], self.values[first:end]))
            remaining -= capacity
        return views

    def head(self, head: int) -> KeyValue:
        """(k, v) [n, D] of one head: views when its pages are one run, else gathered."""
        runs = self.runs(head) or [(self.keys[:0], self.values[:0])]
        return runs[0] if len(runs) == 1 else (torch.cat([k for k, _ in runs]), torch.cat([v for _, v in runs]))


def _spans(pages: NDArray[np.int32], page_size: int) -> tuple[tuple[int, int], ...]:
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    runs = (run for run in np.split(pages, breaks) if run.size)
    return tuple((int(run[0]) * page_size, run.size * page_size) for run in runs)


def _spacing(spans: tuple[tuple[tuple[int, int], ...], ...]) -> int | None:
    if any(len(head) != 1 for head in spans):
        return None
    starts = [head[0][0] for head in spans]
    steps = {after - before for before, after in zip(starts, starts[1:], strict=False)} or {0}
    step = steps.pop()
    return step if not steps and step >= 0 else None
