"""The pool of a TensorRT-LLM session against plain lists of rows, and the proof that this finds seeded bugs."""

from itertools import product
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bpkv_trt.pool import BlockPool, CompactionPlan
from bpkv_trt.pool.block_memory import BlockMemory
from bpkv_trt.pool.block_table import BlockTable
from bpkv_trt.pool.row_positions import RowPositions
from tests.pool.stock_session import StockSession

LAYERS, HEADS, WIDTH, TOKENS, NEW = 3, 2, 4, 4, 14
SHARED = [(0, 0), (0, 1), (0, 2)]  # (pool, layer in it): the stock session's one pool,
APART = [(0, 0), (1, 0), (2, 0)]  # one for every layer,
MIXED = [(1, 0), (0, 0), (1, 1)]  # and anything between


class BlockMachine(RuleBasedStateMachine):
    """A batch from its prompts to its end; rows are written, compacted and finished in any order."""

    pool_class: ClassVar[type[BlockPool]] = BlockPool
    session_class: ClassVar[type[StockSession]] = StockSession
    options: ClassVar[dict[str, Any]] = {}

    @initialize(
        contexts=st.lists(st.integers(1, 11), min_size=1, max_size=3), mapping=st.sampled_from([SHARED, APART, MIXED])
    )
    def prompts(self, contexts: list[int], mapping: list[tuple[int, int]]) -> None:
        self.session = self.session_class(
            contexts, NEW, mapping, pool_class=self.pool_class, poison=True, **self.options
        )
        self.pool, self.numbers = self.session.pool, 0
        self.rows: dict[int, dict[tuple[int, int], list[tuple[int, int, int]]]] = {  # (position, key, value)
            sequence: {head: [] for head in product(range(LAYERS), range(HEADS))} for sequence in range(len(contexts))
        }
        self.logical = dict.fromkeys(self.rows, 0)
        # Places beyond the next token's: what the longest prompt needs, and one a step where no token comes any more.
        self.spare = {sequence: max(contexts) - count for sequence, count in enumerate(contexts)}
        self.finished: set[int] = set()
        for sequence, count in enumerate(contexts):
            self.run(sequence, count)
        self.session.step()

    def run(self, sequence: int, count: int) -> None:
        """The engine writes a sequence's next rows, and the pool is told."""
        row, table = self.rows_of_batch().index(sequence), self.session.table()
        for layer in range(LAYERS):
            numbers = torch.arange(self.numbers, self.numbers + 2 * HEADS * count).view(2, HEADS, count)
            self.numbers += numbers.numel()
            k, v = numbers.float().unsqueeze(-1).expand(-1, -1, -1, WIDTH)
            self.session.write(table, row, layer, len(self.rows[sequence][layer, 0]), k, v)
            for head in range(HEADS):
                positions = range(self.logical[sequence], self.logical[sequence] + count)
                self.rows[sequence][layer, head] += zip(positions, *numbers[:, head].tolist(), strict=True)
        self.logical[sequence] += count
        self.pool.extend(sequence, count)

    def run_all(self) -> None:
        for sequence in self.rows:
            if sequence in self.finished:
                self.spare[sequence] += 1
            else:
                self.run(sequence, 1)

    @precondition(lambda self: self.session.steps < NEW and self.rows)
    @rule()
    def decode(self) -> None:
        self.run_all()
        self.session.step()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """The sampler is done with a row; the session goes on with all of them."""
        self.finished.add(data.draw(st.sampled_from(sorted(self.rows))))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), seed=st.integers(0, 1 << 16))
    def compact(self, data: st.DataObject, seed: int) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.rows)), label="sequence")
        rows, chosen = self.rows[sequence], Random(seed)
        evict = torch.ones(LAYERS, HEADS, max(map(len, rows.values())), dtype=torch.bool)
        kept = [chosen.randint(1, len(rows[self.layers_of(pool)[0], 0])) for pool in range(len(self.session.memories))]
        for pool, count in enumerate(kept):
            for layer, head in product(self.layers_of(pool), range(HEADS)):
                stay = sorted(chosen.sample(range(len(rows[layer, head])), count))
                evict[layer, head, stay] = False
                rows[layer, head] = [rows[layer, head][row] for row in stay]
        held, bytes_held = self.blocks(sequence), self.pool.bytes_of(sequence)
        freed = self.pool.apply(CompactionPlan.from_eviction(self.pool.view(sequence), evict))
        self.spare[sequence] = 0
        needed = [-(-(count + 1) // TOKENS) for count in kept]
        assert self.blocks(sequence) == needed
        assert freed == sum(held) - sum(needed)
        sizes = [memory[0].nbytes for memory in self.session.memories]
        gone = sum((before - after) * size for before, after, size in zip(held, needed, sizes, strict=True))
        assert bytes_held - self.pool.bytes_of(sequence) == gone

    @precondition(lambda self: len(self.session.memories) == 1 and 0 < self.session.steps < NEW and len(self.rows) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A row ends before the others, which move up in the batch. (TensorRT-LLM's managers cannot with two pools.)"""
        sequence = data.draw(st.sampled_from(sorted(self.rows)))
        self.run_all()
        self.session.pools.step([each == sequence for each in self.rows_of_batch()])
        self.session.steps += 1
        self.pool.release(sequence)
        for record in (self.rows, self.logical, self.spare):
            del record[sequence]
        self.finished.discard(sequence)

    def rows_of_batch(self) -> list[int]:
        return [sequence.seq_idx for sequence in self.session.pools._kv_cache_managers[0].sequences]

    def layers_of(self, pool: int) -> list[int]:
        return [layer for layer, (each, _) in enumerate(self.session.mapping.tolist()) if each == pool]

    def blocks(self, sequence: int) -> list[int]:
        """How many, by pool."""
        return [len(self.session.blocks(sequence, pool)) for pool in range(len(self.session.memories))]

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        self.pool.check_integrity()
        assert self.pool.sequences == tuple(self.rows)
        for pool, manager in enumerate(self.session.pools._kv_cache_managers):
            first = self.layers_of(pool)[0]
            rows = {sequence: len(self.rows[sequence][first, 0]) for sequence in self.rows}
            assert manager.lens == [rows[sequence] + 1 + self.spare[sequence] for sequence in self.rows_of_batch()]
            live = sum(-(-length // TOKENS) for length in manager.lens)
            blocks = [*manager.blocks_manager.free_blocks]
            blocks += [block for (each,) in manager.blocks_manager.allocated_blocks.values() for block in each]
            assert len(manager.blocks_manager.free_blocks) + live == manager.blocks_manager.num_blocks
            assert sorted(block.idx for block in blocks) == list(range(manager.blocks_manager.num_blocks))

    @invariant()
    def block_table_is_the_managers_own(self) -> None:
        if self.rows:
            assert torch.equal(self.pool.block_offsets(), self.session.pools.get_block_offsets(1))

    @invariant()
    def contents_are_those_of_the_lists(self) -> None:
        table = self.session.table() if self.rows else None
        for row, sequence in enumerate(self.rows_of_batch()):
            assert self.pool.logical_length(sequence) == self.logical[sequence]
            view = self.pool.view(sequence)
            for layer in range(LAYERS):
                heads = [self.rows[sequence][layer, head] for head in range(HEADS)]
                expected = torch.tensor(heads, dtype=torch.float32).view(HEADS, -1, 3)
                assert view.lengths[layer].tolist() == list(map(len, heads))
                positions = torch.stack([view.positions(layer, head) for head in range(HEADS)])
                assert torch.equal(positions.float(), expected[..., 0])
                rows = [self.pool.heads(sequence, layer).head(head) for head in range(HEADS)]
                stored = self.session.read(table, row, layer, expected.shape[1])
                for side, memory, numbers in zip(zip(*rows, strict=True), stored, (1, 2), strict=True):
                    assert torch.equal(memory, expected[..., numbers, None].expand(-1, -1, WIDTH))
                    assert torch.equal(torch.stack(side), memory)

    def teardown(self) -> None:
        """The session stops: all is free again."""
        if not hasattr(self, "session"):
            return
        self.session.pools.step([True] * len(self.rows))
        for sequence in list(self.rows):
            self.pool.release(sequence)
        self.pool.check_integrity()
        for manager in self.session.pools._kv_cache_managers:
            assert len(manager.blocks_manager.free_blocks) == manager.blocks_manager.num_blocks


BlockMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBlockPool = BlockMachine.TestCase


def no_place_for_the_next_token(self: BlockTable, sequence: int, rows: int, honest: Any) -> int:
    freed = honest(self, sequence, rows - 1)
    self.manager.lens[self._owner(sequence).get_batch_idx()] += 1
    return freed


def blocks_stay(self: BlockTable, sequence: int, rows: int, honest: Any) -> int:
    self.manager.lens[self._owner(sequence).get_batch_idx()] = rows + 1
    return 0


def lens_stay(self: BlockTable, sequence: int, rows: int, honest: Any) -> int:
    before = self.reserved(sequence)
    freed = honest(self, sequence, rows)
    self.manager.lens[self._owner(sequence).get_batch_idx()] = before
    return freed


def block_freed_twice(self: BlockTable, sequence: int, rows: int, honest: Any) -> int:
    freed = honest(self, sequence, rows)
    if freed:
        self.manager.blocks_manager.free_blocks.append(self.manager.blocks_manager.free_blocks[-1])
    return freed


def link_stays(self: BlockTable, sequence: int, rows: int, honest: Any) -> int:
    freed = honest(self, sequence, rows)
    for block in self.manager.blocks_manager.free_blocks[-freed:] if freed else []:
        block.ref_count += 1
    return freed


def all_heads_as_the_first(self: BlockMemory, blocks: Any, rows: torch.Tensor, honest: Any) -> None:
    honest(self, blocks, rows[:, :1].expand_as(rows))


def one_row_after_another_from_the_end(self: BlockMemory, blocks: Any, rows: torch.Tensor, honest: Any) -> None:
    for target in reversed(range(rows.shape[2])):
        moved = torch.arange(target + 1).expand(*rows.shape[:2], -1).clone()
        moved[..., target] = rows[..., target]
        honest(self, blocks, moved)


def positions_stay(self: RowPositions, rows: Any, honest: Any) -> None:
    honest(self, [torch.arange(each.shape[2]).expand_as(each) for each in rows])


def tokens_since_are_forgotten(self: RowPositions, rows: Any, honest: Any) -> None:
    before = self.compacted_at
    honest(self, rows)
    self.compacted_at = before


@pytest.mark.parametrize(
    "owner, method, bug",
    [
        (BlockTable, "truncate", no_place_for_the_next_token),
        (BlockTable, "truncate", blocks_stay),
        (BlockTable, "truncate", lens_stay),
        (BlockTable, "truncate", block_freed_twice),
        (BlockTable, "truncate", link_stays),
        (BlockMemory, "pack", all_heads_as_the_first),
        (BlockMemory, "pack", one_row_after_another_from_the_end),
        (RowPositions, "keep", positions_stay),
        (RowPositions, "keep", tokens_since_are_forgotten),
    ],
)
def test_the_machine_finds_a_seeded_bug(owner: type, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *given: bug(self, *given, honest))
    search = settings(
        BlockMachine.TestCase.settings, max_examples=40, derandomize=True, database=None, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(BlockMachine, settings=search)
