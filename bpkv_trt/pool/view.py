"""What a policy sees of a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.pool.rows import KeyValue

if TYPE_CHECKING:  # Triton is optional
    from bpkv_trt.kernels.paged import PagedCache


class HeadRows(Protocol):
    """The rows of one layer of a sequence, whatever the pool's layout."""

    @property
    def lengths(self) -> list[int]:
        """Rows per head."""

    def head(self, head: int) -> KeyValue:
        """(k, v) [n, D] of one head."""


class RowStore(Protocol):
    """A pool that a view can read."""

    def heads(self, sequence: int, layer: int) -> HeadRows: ...

    def positions(self, sequence: int, layer: int, head: int) -> Tensor: ...

    def gather(self, sequence: int, layer: int, head: NDArray[np.int64], rows: NDArray[np.int64]) -> KeyValue: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def by_kernels(self) -> bool: ...

    def caches(self, sequences: Sequence[int]) -> list["PagedCache"]: ...


@dataclass(frozen=True)
class SequenceView:
    """One sequence as it is now: lengths are a snapshot, rows are read from the pool. Drop it when the pool changes.

    Lengths are the host's; every tensor lies on the pool's device.
    """

    sequence: int
    lengths: NDArray[np.int32]  # [L, Hkv] rows held
    logical_length: int  # tokens seen
    store: RowStore

    def keys(self, layer: int, head: int) -> Tensor:
        """[n, D] keys of one head: a view when its pages are one run, else that one head gathered."""
        return self._rows(layer, head).head(head)[0]

    def values(self, layer: int, head: int) -> Tensor:
        """[n, D] values of one head, as `keys`."""
        return self._rows(layer, head).head(head)[1]

    def positions(self, layer: int, head: int) -> Tensor:
        """[n] int32 logical positions of one head's rows, ascending."""
        return self.store.positions(self.sequence, layer, head)

    def gather(self, layer: int, head: NDArray[np.int64], rows: NDArray[np.int64]) -> KeyValue:
        """(k, v) [n, D] of rows `rows` of heads `head`, copied."""
        return self.store.gather(self.sequence, layer, head, rows)

    @property
    def by_kernels(self) -> bool:
        """Whether Triton kernels work on the pool, and `caches` can be asked for."""
        return self.store.by_kernels

    def caches(self) -> list["PagedCache"]:
        """By layer, the rows as kernels find them: a batch of one sequence."""
        return self.store.caches([self.sequence])

    def position_table(self) -> Tensor:
        """[L, Hkv, T] int32 logical positions, T the longest length; -1 beyond a head's end."""
        layers, heads = self.lengths.shape
        longest = int(self.lengths.max())
        table = torch.full((layers, heads, longest), -1, dtype=torch.int32, device=self.store.device)
        for layer, head in np.ndindex(layers, heads):
            table[layer, head, : self.lengths[layer, head]] = self.positions(layer, head)
        return table

    def _rows(self, layer: int, head: int) -> HeadRows:
        rows = self.store.heads(self.sequence, layer)
        assert rows.lengths[head] == self.lengths[layer, head], "the sequence changed under this view"
        return rows
