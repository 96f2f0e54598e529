"""The paged KV pool: every page belongs to one (sequence, layer, KV head), so every emptied page is really freed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.errors import PoolExhausted, StalePlan
from bpkv_trt.pool.allocator import EXTENT, PageAllocator
from bpkv_trt.pool.integrity import check_integrity
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.rows import KeyValue, LayerLayout, LayerRows
from bpkv_trt.pool.storage import RowStorage, pages_of
from bpkv_trt.pool.table import PageTable
from bpkv_trt.pool.view import SequenceView

if TYPE_CHECKING:  # Triton is optional
    from bpkv_trt.kernels.paged import PagedCache
    from bpkv_trt.pool.device_table import DeviceTable


@dataclass
class _Placement:
    """What is remembered of where a sequence lies; forgotten whenever one of its pages or rows moves."""

    layouts: dict[int, LayerLayout] = field(default_factory=dict)  # by layer
    tail: Tensor | None = None  # [L, Hkv, n] int64 flat rows of the latest extend


class PagedKvPool:
    """Keys and values of many sequences in pages of `page_size` rows.

    32 rows by default: TensorRT-LLM's own block size, a whole number of tensor-core tiles, and at 1,000 kept rows per
    head a loss of under 2 % to half-empty last pages. Rows nobody wrote are undefined (NaN with `poison`), never 0.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int = 32,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        poison: bool = False,
        kernels: bool | None = None,
    ) -> None:
        """kernels: whether Triton kernels work on it; by default on a GPU. On a CPU they need Triton's interpreter.

        Raises ConfigError where kernels cannot read such rows, or Triton or its interpreter is not there.
        """
        sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "pages": pages, "page_size": page_size}
        assert min(sizes.values()) >= 1, f"a pool needs 1 or more of each: {sizes}"
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.pages, self.page_size, self.poison = pages, page_size, poison
        self._storage = RowStorage(pages, page_size, head_dim, dtype, device)
        self.keys, self.values = self._storage.keys, self._storage.values  # [pages, page_size, D]
        self.row_positions = self._storage.positions  # [pages, page_size] int32, logical; -1 where nothing was written
        self._allocator = PageAllocator(pages)
        self._table = PageTable(layers, kv_heads, page_size)
        self._device_table = self._make_device_table() if kernels or (kernels is None and self.keys.is_cuda) else None
        self._placements: dict[int, _Placement] = {}
        self._expected_rows: dict[int, int] = {}
        if poison:
            self._storage.poison(np.arange(pages * page_size))

    def _make_device_table(self) -> "DeviceTable":
        from bpkv_trt.pool.device_table import DeviceTable

        return DeviceTable(self._table, self._storage)

    # Sequences

    def admit(self, expected_rows: int = 0) -> int:
        """Open an empty sequence; returns its handle, which is never used again.

        `expected_rows` is how long the sequence may become: a hint for placement only, nothing is reserved.
        """
        sequence = self._table.add()
        self._placements[sequence] = _Placement()
        self._expected_rows[sequence] = expected_rows
        return sequence

    def release(self, sequence: int) -> None:
        """Close a sequence, finished or aborted, and free its pages."""
        self._free(self._table.owned(self._table.slots[sequence]))
        self._table.remove(sequence)
        del self._placements[sequence], self._expected_rows[sequence]

    def fork(self, sequence: int) -> int:
        """Copy a sequence page by page; returns the copy's handle. PoolExhausted leaves everything as it was."""
        source = self._table.slots[sequence]
        counts = self._table.page_counts(source)
        self._require(int(counts.sum()), "a copy of the sequence")
        copy = self.admit(self._expected_rows[sequence])
        target = self._table.slots[copy]
        self._allocate(copy, counts)
        self._table.lengths[target] = self._table.lengths[source]
        self._table.logical[target] = self._table.logical[source]
        self._storage.copy_pages(self._table.owned(source), self._table.owned(target))
        return copy

    def extend(self, sequence: int, count: int) -> None:
        """Make room for `count` more rows in every layer and head, at the next logical positions.

        The new rows are undefined until `write`. PoolExhausted leaves everything as it was.
        """
        self.extend_all([(sequence, count)])

    def extend_all(self, growth: Sequence[tuple[int, int]]) -> None:
        """Extend several different sequences, each by its own count: all of them or, with PoolExhausted, none."""
        needed = {sequence: self._pages_to_grow(sequence, count) for sequence, count in growth}
        assert len(needed) == len(growth), "a sequence is extended twice"
        total = sum(int(pages.sum()) for pages in needed.values())
        self._require(total, f"{sum(count for _, count in growth)} more tokens")
        for sequence, count in growth:
            self._extend(sequence, count, needed[sequence])

    def require_growth(self, sequence: int, count: int) -> None:
        """Raise PoolExhausted where `count` more tokens of a sequence would not fit, one after the other."""
        self._require(self.pages_to_grow(sequence, count), f"{count} more tokens")

    def write(self, sequence: int, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values [Hkv, n, D], of the pool's type, as the last n rows of a layer."""
        count, uniform = k.shape[1], self.heads(sequence, layer).uniform
        if uniform is not None:
            assert count <= uniform[0].shape[1], "more rows than a head holds"
            for rows, new in zip(uniform, (k, v), strict=True):
                rows[:, -count:] = new
            return
        tail = self._placements[sequence].tail
        if tail is None or tail.shape[2] != count:
            tail = self._storage.index(self._table.last_rows(self._table.slots[sequence], count))
        self._storage.key_rows[tail[layer]] = k
        self._storage.value_rows[tail[layer]] = v

    def last_rows(self, sequences: Sequence[int]) -> Tensor:
        """[L, Hkv, B] int64 flat rows of the last token of every sequence, for `write_rows`."""
        slots = [self._table.slots[sequence] for sequence in sequences]
        return self._storage.index(np.concatenate([self._table.last_rows(slot, 1) for slot in slots], axis=-1))

    def write_rows(self, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [Hkv, B, D], of the pool's type, in flat rows [Hkv, B]."""
        self._storage.key_rows[rows] = k
        self._storage.value_rows[rows] = v

    def retract(self, sequence: int, count: int) -> None:
        """Take back the last `count` tokens, which every head still holds: their rows and their logical positions."""
        slot, last = self._table.slots[sequence], self.logical_length(sequence) - count
        rows = self._storage.index(self._table.last_rows(slot, count))  # [L, Hkv, count]
        assert bool((self._storage.position_rows[rows[..., :1]] == last).all()), "a head evicted one of these tokens"
        self._table.lengths[slot] -= count
        self._table.logical[slot] -= count
        self._free(self._table.truncate(slot, self._page_counts(self._table.lengths[slot])))
        if self.poison:
            self._storage.poison(self._table.unused_rows(slot))
        self._forget_placement(sequence)

    def drop_front(self, sequence: int, layer: int, rows: int) -> int:
        """Free the leading whole pages of a layer that lie within its first `rows` rows; returns how many pages.

        For sliding-window layers. The remaining rows keep their place and their positions.
        """
        slot, freed = self._table.slots[sequence], 0
        for head, length in enumerate(self._table.lengths[slot, layer].tolist()):
            count = min(rows, length) // self.page_size
            self._free(self._table.shift(slot, layer, head, count))
            freed += count
        if freed:
            self._forget_placement(sequence)
        return freed

    def apply(self, plan: CompactionPlan) -> int:
        """Keep only the planned rows, packed to the front of their heads; returns how many pages this freed.

        Raises StalePlan, with nothing moved, if the plan does not fit the sequence as it is.
        """
        slot = self._table.slots.get(plan.sequence)
        if slot is None:
            raise StalePlan(
                f"The compaction plan is for sequence {plan.sequence}, which this pool does not hold (any more). "
                "Nothing was moved. Admit the sequence and score it again."
            )
        plan.validate(self._table.lengths[slot], self.logical_length(plan.sequence))
        if self._device_table is None:
            self._storage.move(*map(self._storage.index, self._table.moves(slot, plan.offsets, plan.rows)))
        else:
            self._device_table.pack(slot, plan.offsets, plan.rows)
        self._table.lengths[slot] = plan.counts
        freed = self._table.truncate(slot, self._page_counts(plan.counts))
        self._free(freed)
        if self.poison:
            self._storage.poison(self._table.unused_rows(slot))
        self._forget_placement(plan.sequence)
        return freed.size

    # Reading

    def heads(self, sequence: int, layer: int) -> LayerRows:
        """The rows of one layer, without a copy; good until the sequence changes."""
        slot, layouts = self._table.slots[sequence], self._placements[sequence].layouts
        layout = layouts.get(layer)
        if layout is None:
            layout = layouts[layer] = LayerLayout.of(self._table.pages[slot, layer], self.page_size)
        lengths = self._table.lengths[slot, layer].tolist()
        return LayerRows(self._storage.key_rows, self._storage.value_rows, layout, lengths)

    def caches(self, sequences: Sequence[int]) -> list["PagedCache"]:
        """By layer, the rows of several sequences as kernels find them; good until one of these changes."""
        assert self._device_table is not None, "no kernels work on this pool"
        return self._device_table.caches([self._table.slots[sequence] for sequence in sequences])

    def gather(self, sequence: int, layer: int, head: NDArray[np.int64], rows: NDArray[np.int64]) -> KeyValue:
        """(k, v) [n, D] of rows `rows` of heads `head`, copied."""
        located = self._table.locate(self._table.slots[sequence], layer * self.kv_heads + head, rows)
        index = self._storage.index(located)
        return self._storage.key_rows[index], self._storage.value_rows[index]

    def view(self, sequence: int) -> SequenceView:
        """What a policy sees of a sequence now."""
        return SequenceView(sequence, self.lengths(sequence), self.logical_length(sequence), self)

    def lengths(self, sequence: int) -> NDArray[np.int32]:
        """[L, Hkv] int32 rows held, a copy."""
        return np.array(self._table.lengths[self._table.slots[sequence]])

    def logical_length(self, sequence: int) -> int:
        """Tokens the sequence has seen, evicted or not: the position of the next one."""
        return int(self._table.logical[self._table.slots[sequence]])

    def positions(self, sequence: int, layer: int, head: int) -> Tensor:
        """[n] int32 logical positions of a head's rows, ascending."""
        slot = self._table.slots[sequence]
        rows = np.arange(self._table.lengths[slot, layer, head])
        located = self._table.locate(slot, layer * self.kv_heads + head, rows)
        return self._storage.position_rows[self._storage.index(located)]

    def page_table(self, sequence: int) -> NDArray[np.int32]:
        """[L, Hkv, P] int32 pages of every head in order, padded with -1 to the longest head; a copy."""
        slot = self._table.slots[sequence]
        return np.array(self._table.pages[slot, :, :, : self._table.page_counts(slot).max()])

    @property
    def sequences(self) -> tuple[int, ...]:
        """Handles of the sequences held."""
        return tuple(self._table.slots)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.keys.device

    @property
    def by_kernels(self) -> bool:
        """Whether Triton kernels work on it."""
        return self._device_table is not None

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the cache."""
        return self.keys.element_size()

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.free_pages

    @property
    def live_pages(self) -> int:
        """Pages owned by a sequence."""
        return self.pages - self.free_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values in one page."""
        return self._storage.page_bytes

    def pages_for(self, rows: int) -> int:
        """Pages that an uncompacted sequence of so many rows owns, over all layers and KV heads."""
        return self.layers * self.kv_heads * pages_of(rows, self.page_size)

    def pages_to_grow(self, sequence: int, count: int) -> int:
        """Pages that `extend(sequence, count)` would take."""
        return int(self._pages_to_grow(sequence, count).sum())

    def owned_pages(self, sequence: int) -> int:
        """Pages that a sequence owns."""
        return int(self._table.owned(self._table.slots[sequence]).size)

    def bytes_of(self, sequence: int) -> int:
        """Bytes of the pages a sequence owns."""
        return self.owned_pages(sequence) * self.page_bytes

    def entries_of(self, sequence: int) -> int:
        """Rows a sequence holds over all layers and KV heads."""
        return int(self._table.lengths[self._table.slots[sequence]].sum())

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself or the memory."""
        check_integrity(self._allocator, self._table, self._storage, poisoned=self.poison)

    # Within

    def _page_counts(self, rows: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int64]:
        return pages_of(rows.astype(np.int64), self.page_size)

    def _pages_to_grow(self, sequence: int, count: int) -> NDArray[np.int64]:
        lengths = self._table.lengths[self._table.slots[sequence]]
        return self._page_counts(lengths + count) - self._page_counts(lengths)  # [L, Hkv]

    def _extend(self, sequence: int, count: int, needed: NDArray[np.int64]) -> None:
        slot, first = self._table.slots[sequence], self.logical_length(sequence)
        if needed.any():
            self._allocate(sequence, needed)
        self._table.lengths[slot] += count
        self._table.logical[slot] += count
        tail = self._placements[sequence].tail = self._storage.index(self._table.last_rows(slot, count))
        self._storage.position_rows[tail] = torch.arange(first, first + count, dtype=torch.int32, device=tail.device)

    def _require(self, needed: int, purpose: str) -> None:
        if needed > self.free_pages:
            raise PoolExhausted(
                f"The KV pool cannot hold {purpose}: {needed} pages of {self.page_size} rows are needed and "
                f"{self.free_pages} of {self.pages} are free. Release or compact a sequence, or make the pool larger."
            )

    def _allocate(self, sequence: int, needed: NDArray[np.int64]) -> None:
        pages = int(needed.max())
        wanted = pages_of(self._expected_rows[sequence], self.page_size) or (pages // EXTENT + 1) * EXTENT
        share = self.free_pages // needed.size  # further apart, and the last layers would find no room
        spacing = max(pages, min(wanted, share))
        self._table.grow(self._table.slots[sequence], needed, spacing, self._allocator)
        for layer in np.flatnonzero(needed.any(axis=1)).tolist():  # ragged heads grow in turn, a few at a time
            self._placements[sequence].layouts.pop(layer, None)

    def _forget_placement(self, sequence: int) -> None:
        self._placements[sequence] = _Placement()

    def _free(self, pages: NDArray[np.int32]) -> None:
        self._allocator.release(pages)
        if self.poison:
            rows = pages[:, None].astype(np.int64) * self.page_size + np.arange(self.page_size)
            self._storage.poison(rows.ravel())
