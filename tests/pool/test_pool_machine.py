"""The pool against a plain dictionary of rows, and the proof that this comparison finds seeded bugs."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from numpy.typing import NDArray

from bpkv_trt.errors import PoolExhausted
from bpkv_trt.pool import CompactionPlan, PagedKvPool

LAYERS, HEADS, WIDTH, PAGE, PAGES = 2, 2, 4, 4, 24


@dataclass
class Reference:
    """One sequence as every head's list of (position, key number, value number)."""

    logical: int = 0
    rows: dict[tuple[int, int], list[tuple[int, int, int]]] = field(
        default_factory=lambda: {(layer, head): [] for layer in range(LAYERS) for head in range(HEADS)}
    )

    def copy(self) -> "Reference":
        return Reference(self.logical, {head: list(rows) for head, rows in self.rows.items()})

    @property
    def pages(self) -> int:
        return sum(-(-len(rows) // PAGE) for rows in self.rows.values())

    @property
    def latest(self) -> int:
        """How many of the last tokens every head still holds."""
        counts = range(min(map(len, self.rows.values())), 0, -1)
        held = (
            count for count in counts if all(rows[-count][0] == self.logical - count for rows in self.rows.values())
        )
        return next(held, 0)


class PoolMachine(RuleBasedStateMachine):
    """Admit, extend and write, retract, compact, fork, drop, release in any order, compared after every step."""

    pool_class: ClassVar[type[PagedKvPool]] = PagedKvPool

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.pool_class(
            layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, pages=PAGES, page_size=PAGE, poison=True
        )
        self.reference: dict[int, Reference] = {}
        self.numbers = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.reference)), label="sequence")

    @rule()
    def admit(self) -> None:
        sequence = self.pool.admit()
        assert sequence not in self.reference
        self.reference[sequence] = Reference()

    @precondition(lambda self: self.reference)
    @rule(data=st.data(), count=st.integers(1, 9), chunks=st.integers(1, 2))
    def extend_and_write(self, data: st.DataObject, count: int, chunks: int) -> None:
        sequence = self.pick(data)
        reference = self.reference[sequence]
        needed = sum(-(-(len(rows) + count) // PAGE) - -(-len(rows) // PAGE) for rows in reference.rows.values())
        assert self.pool.pages_to_grow(sequence, count) == needed
        if needed > self.pool.free_pages:
            with pytest.raises(PoolExhausted, match=f"{needed} pages .* {self.pool.free_pages} of {PAGES}"):
                self.pool.extend(sequence, count)
            return
        self.pool.extend(sequence, count)
        for layer in range(LAYERS):
            numbers = np.arange(self.numbers, self.numbers + HEADS * count * 2).reshape(2, HEADS, count)
            self.numbers += numbers.size
            k, v = torch.from_numpy(numbers).float().unsqueeze(-1).expand(2, HEADS, count, WIDTH)
            self.pool.write(sequence, layer, torch.zeros_like(k), torch.zeros_like(v))
            late = max(1, count // chunks)  # the last rows again, fewer than were made room for
            self.pool.write(sequence, layer, k, v)
            self.pool.write(sequence, layer, k[:, -late:], v[:, -late:])
            for head in range(HEADS):
                positions = range(reference.logical, reference.logical + count)
                new = zip(positions, numbers[0, head].tolist(), numbers[1, head].tolist(), strict=True)
                reference.rows[layer, head] += new
        reference.logical += count

    @precondition(lambda self: self.reference)
    @rule(data=st.data(), count=st.integers(1, 12))
    def retract(self, data: st.DataObject, count: int) -> None:
        sequence = self.pick(data)
        reference = self.reference[sequence]
        if count > reference.latest:
            with pytest.raises(AssertionError, match="more rows than a head holds|a head evicted one of these tokens"):
                self.pool.retract(sequence, count)
            return
        self.pool.retract(sequence, count)
        reference.rows = {head: rows[:-count] for head, rows in reference.rows.items()}
        reference.logical -= count

    @precondition(lambda self: any(reference.logical for reference in self.reference.values()))
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        reference = self.reference[sequence]
        longest = max(map(len, reference.rows.values()))
        evict = torch.zeros(LAYERS, HEADS, longest, dtype=torch.bool)
        for (layer, head), rows in reference.rows.items():
            if rows:
                bits = data.draw(st.integers(1, 2 ** len(rows) - 1), label=f"kept {layer}.{head}")
                kept = [row for row in range(len(rows)) if bits >> row & 1]
                evict[layer, head] = True
                evict[layer, head, kept] = False
                reference.rows[layer, head] = [rows[row] for row in kept]
        free, held = self.pool.free_pages, self.pool.bytes_of(sequence)
        freed = self.pool.apply(CompactionPlan.from_eviction(self.pool.view(sequence), evict))
        assert freed == self.pool.free_pages - free
        assert held - self.pool.bytes_of(sequence) == freed * self.pool.page_bytes

    @precondition(lambda self: self.reference)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if self.reference[sequence].pages > self.pool.free_pages:
            with pytest.raises(PoolExhausted):
                self.pool.fork(sequence)
        else:
            self.reference[self.pool.fork(sequence)] = self.reference[sequence].copy()

    @precondition(lambda self: self.reference)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), rows=st.integers(0, 12))
    def drop_front(self, data: st.DataObject, layer: int, rows: int) -> None:
        sequence = self.pick(data)
        reference, freed = self.reference[sequence], 0
        for head in range(HEADS):
            held = reference.rows[layer, head]
            dropped = min(rows, len(held)) // PAGE
            reference.rows[layer, head] = held[dropped * PAGE :]
            freed += dropped
        assert self.pool.drop_front(sequence, layer, rows) == freed

    @precondition(lambda self: self.reference)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.pool.release(sequence)
        del self.reference[sequence]

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        self.pool.check_integrity()
        assert self.pool.live_pages == sum(reference.pages for reference in self.reference.values())
        assert self.pool.free_pages + self.pool.live_pages == PAGES
        assert self.pool.sequences == tuple(self.reference)

    @invariant()
    def contents_are_those_of_the_reference(self) -> None:
        for sequence, reference in self.reference.items():
            assert self.pool.logical_length(sequence) == reference.logical
            view = self.pool.view(sequence)
            for (layer, head), rows in reference.rows.items():
                assert view.lengths[layer, head] == len(rows)
                expected = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
                assert torch.equal(view.positions(layer, head).float(), expected[:, 0])
                assert torch.equal(view.keys(layer, head), expected[:, 1:2].expand(-1, WIDTH))
                assert torch.equal(view.values(layer, head), expected[:, 2:3].expand(-1, WIDTH))
            for layer in range(LAYERS):
                uniform = self.pool.heads(sequence, layer).uniform
                if uniform is not None:
                    for side, read in zip(uniform, (view.keys, view.values), strict=True):
                        assert torch.equal(side, torch.stack([read(layer, head) for head in range(HEADS)]))


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = PoolMachine.TestCase


class DoubleFree(PagedKvPool):
    def _free(self, pages: NDArray[np.int32]) -> None:
        super()._free(pages)
        self._allocator.free_pages += pages.size


class SecondOwner(PagedKvPool):
    """Frees a page on compaction that a head still holds."""

    def apply(self, plan: CompactionPlan) -> int:
        freed = super().apply(plan)
        if freed:
            self._free(self._table.owned(self._table.slots[plan.sequence])[-1:])
        return freed


class Leak(PagedKvPool):
    def _free(self, pages: NDArray[np.int32]) -> None:
        super()._free(pages[:-1])


class PageTooMany(PagedKvPool):
    def _page_counts(self, rows: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int64]:
        return rows.astype(np.int64) // self.page_size + 1


class PageTooFew(PagedKvPool):
    def _page_counts(self, rows: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(rows.astype(np.int64) // self.page_size, 1)


class StaleLength(PagedKvPool):
    def apply(self, plan: CompactionPlan) -> int:
        freed = super().apply(plan)
        self._table.lengths[self._table.slots[plan.sequence], -1] = plan.lengths[-1]
        return freed


class PagesStay(PagedKvPool):
    """Takes rows back and keeps the pages that they filled."""

    def retract(self, sequence: int, count: int) -> None:
        slot, pages = self._table.slots[sequence], self.page_table(sequence)
        super().retract(sequence, count)
        self._table.pages[slot, :, :, : pages.shape[-1]] = pages


class RetractedStays(PagedKvPool):
    """Takes rows back and not their logical positions."""

    def retract(self, sequence: int, count: int) -> None:
        super().retract(sequence, count)
        self._table.logical[self._table.slots[sequence]] += count


class PositionsStay(PagedKvPool):
    def apply(self, plan: CompactionPlan) -> int:
        positions = self.row_positions.clone()
        freed = super().apply(plan)
        held = self.row_positions >= 0
        self.row_positions[held] = positions[held]
        return freed


class StaleView(PagedKvPool):
    def _forget_placement(self, sequence: int) -> None:
        self._placements[sequence].tail = None


class DescendingTiles(PagedKvPool):
    """Stores each row before the next lower one is read: what a race between tiles would do."""

    def apply(self, plan: CompactionPlan) -> int:
        move = self._storage.move

        def one_by_one_from_the_end(source: torch.Tensor, target: torch.Tensor) -> None:
            for loads, stores in zip(source.flip(0)[:, None], target.flip(0)[:, None], strict=True):
                move(loads, stores)

        self._storage.move = one_by_one_from_the_end  # type: ignore[method-assign]
        try:
            return super().apply(plan)
        finally:
            self._storage.move = move  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "mutant",
    [
        DoubleFree,
        SecondOwner,
        Leak,
        PageTooMany,
        PageTooFew,
        StaleLength,
        PagesStay,
        RetractedStays,
        PositionsStay,
        StaleView,
        DescendingTiles,
    ],
)
def test_the_machine_finds_a_seeded_bug(mutant: type[PagedKvPool]) -> None:
    machine = type(f"{mutant.__name__}Machine", (PoolMachine,), {"pool_class": mutant})
    search = settings(
        PoolMachine.TestCase.settings, max_examples=200, derandomize=True, database=None, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=search)
