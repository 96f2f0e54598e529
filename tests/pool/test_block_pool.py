"""What the pool of a TensorRT-LLM session promises beyond contents: refusals, atomicity, bytes, quantised numbers."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bpkv_trt.errors import ConfigError, StalePlan
from bpkv_trt.pool import BlockPool, CompactionPlan
from tests.pool.stock_managers import GenerationSequence, KVCacheManager
from tests.pool.stock_session import StockSession

LAYERS, HEADS, WIDTH, TOKENS = 3, 2, 4, 4
SHARED, APART = [(0, 0), (0, 1), (0, 2)], [(0, 0), (1, 0), (2, 0)]
FP8 = torch.float8_e4m3fn


def encoded(contexts: list[int], mapping: list[tuple[int, int]] = SHARED, **options: Any) -> StockSession:
    """A batch after its prompts, at the hook where it may be compacted; rows are random numbers of the cache's type."""
    session = StockSession(contexts, 20, mapping, **{"poison": True, **options})
    for row in range(len(contexts)):
        run(session, row, contexts[row])
    session.step()
    return session


def run(session: StockSession, row: int, count: int) -> None:
    table, length = session.table(), session.pool.lengths(row)
    for layer in range(LAYERS):
        dtype = session.memories[0].dtype
        rows = torch.randn(2, HEADS, count, WIDTH) * (40 if dtype == torch.int8 else 1)
        session.write(table, row, layer, int(length[layer, 0]), *rows.to(dtype))
    session.pool.extend(row, count)


def keep(pool: BlockPool, sequence: int, counts: list[list[int]]) -> CompactionPlan:
    """Keep the last `counts` [L, Hkv] rows of every head."""
    view = pool.view(sequence)
    gone = torch.from_numpy(view.lengths) - torch.tensor(counts)
    return CompactionPlan.from_eviction(view, torch.arange(int(view.lengths.max())) < gone[..., None])


def state(session: StockSession) -> list[Any]:
    """All that a compaction may change, to the bit."""
    memory = [rows.view(torch.uint8).tolist() for rows in session.memories]
    blocks: list[Any] = []
    for manager in session.pools._kv_cache_managers:
        lists = [manager.blocks_manager.free_blocks, *(b for (b,) in manager.blocks_manager.allocated_blocks.values())]
        blocks += [[(block.idx, block.ref_count) for block in each] for each in lists] + [list(manager.lens)]
    pool = session.pool
    of_pool = [(pool.logical_length(each), pool.view(each).position_table().tolist()) for each in pool.sequences]
    return [memory, blocks, of_pool, pool.block_offsets().tolist()]


@pytest.mark.parametrize("mapping", [SHARED, APART])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plan: {"sequence": 77}, "does not hold"),
        (lambda plan: {"sequence": 1}, "another state"),
        (lambda plan: {"lengths": plan.lengths + 1}, "another state"),
        (lambda plan: {"logical_length": plan.logical_length + 1}, "another state"),
        (lambda plan: {"offsets": plan.offsets[:-1]}, "does not list the kept rows of 6 heads"),
        (lambda plan: {"rows": plan.rows[::-1].copy()}, "do not ascend"),
        (lambda plan: {"rows": plan.rows + 1}, "rows that do not exist"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(
    mapping: list[tuple[int, int]], change: Callable[[CompactionPlan], dict[str, Any]], reason: str
) -> None:
    session = encoded([14, 9], mapping)
    plan = keep(session.pool, 0, [[6] * HEADS] * LAYERS)
    before = state(session)
    with pytest.raises(StalePlan, match=reason):
        session.pool.apply(replace(plan, **change(plan)))
    assert state(session) == before
    session.pool.apply(plan)
    assert state(session) != before
    with pytest.raises(StalePlan, match="another state"):
        session.pool.apply(plan)
    session.pool.check_integrity()


@pytest.mark.parametrize(
    ("mapping", "counts"),
    [
        (SHARED, [[6, 6], [6, 6], [7, 7]]),
        (SHARED, [[6, 7], [6, 6], [6, 6]]),
        (APART, [[6, 6], [8, 8], [7, 6]]),
        ([(1, 0), (0, 0), (1, 1)], [[6, 6], [8, 8], [7, 7]]),
    ],
)
def test_counts_that_shared_blocks_cannot_hold_are_refused(
    mapping: list[tuple[int, int]], counts: list[list[int]]
) -> None:
    session = encoded([14, 9], mapping)
    before = state(session)
    with pytest.raises(ConfigError, match=r"keeps 6 to 7 rows per head .*scope head"):
        session.pool.apply(keep(session.pool, 0, counts))
    assert state(session) == before


def test_layers_with_pools_of_their_own_keep_counts_of_their_own() -> None:
    session = encoded([14, 9], APART)
    freed = session.pool.apply(keep(session.pool, 0, [[1, 1], [14, 14], [7, 7]]))
    assert freed == 3 + 0 + 2  # of 4 each: 1, 4 and 2 hold those rows and the next token's
    assert session.pool.lengths(0)[:, 0].tolist() == [1, 14, 7]
    assert [session.lens(pool) for pool in range(3)] == [[2, 15], [15, 15], [8, 15]]
    session.pool.check_integrity()


def test_before_the_managers_have_stepped_nothing_is_compacted() -> None:
    session = StockSession([14], 20, SHARED, poison=True)
    run(session, 0, 14)
    plan, before = keep(session.pool, 0, [[6] * HEADS] * LAYERS), state(session)
    with pytest.raises(AssertionError, match="after the managers' step"):
        session.pool.apply(plan)
    assert state(session) == before
    session.step()
    session.pool.apply(plan)
    session.pool.check_integrity()


def test_a_short_prompt_gives_back_what_only_the_longest_needs() -> None:
    session = encoded([17, 3])
    block = session.memories[0][0].nbytes
    assert [session.pool.bytes_of(row) for row in (0, 1)] == [5 * block] * 2
    assert session.pool.apply(keep(session.pool, 1, [[3] * HEADS] * LAYERS)) == 4
    assert (session.pool.bytes_of(1), session.lens(0)) == (block, [18, 4])


def test_keeping_everything_changes_no_row() -> None:
    session = encoded([14, 9], poison=False)
    before = state(session)
    assert session.pool.apply(keep(session.pool, 0, [[14] * HEADS] * LAYERS)) == 0
    assert state(session) == before


def test_only_what_lies_in_live_blocks_is_read() -> None:
    session = encoded([15, 11], poison=False)
    session.pool.apply(keep(session.pool, 0, [[5] * HEADS] * LAYERS))
    [memory], [manager] = session.memories, session.pools._kv_cache_managers
    view = session.pool.view(0)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]

    def read() -> list[Tensor]:
        return [side(*head).clone() for head in heads for side in (view.keys, view.values)]

    before = read()
    memory[[block.idx for block in manager.blocks_manager.free_blocks]] = torch.nan
    assert all(map(torch.equal, read(), before)), "a freed block is read"
    [first, _] = session.blocks(0)
    memory[first] = torch.nan
    assert all(
        rows[:TOKENS].isnan().all() and torch.equal(rows[TOKENS:], was[TOKENS:])
        for rows, was in zip(read(), before, strict=True)
    )


def test_rows_that_go_are_poisoned() -> None:
    session = encoded([15, 11])
    freed = session.blocks(0)[2:]
    session.pool.apply(keep(session.pool, 0, [[5] * HEADS] * LAYERS))
    assert bool(session.memories[0][freed].isnan().all())
    session.pool.check_integrity()
    session.memories[0][freed[0], 1, 0, 1, 2] = 0.0
    with pytest.raises(AssertionError, match="where no sequence holds one"):
        session.pool.check_integrity()


def test_more_rows_than_blocks_cannot_have_been_written() -> None:
    session = encoded([14])
    session.pool.extend(0, 1)
    with pytest.raises(AssertionError, match="more rows than there are blocks for"):
        session.pool.extend(0, 1)
    assert session.pool.logical_length(0) == 15


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("mapping", [SHARED, APART])
def test_quantised_rows_read_as_numbers_and_move_as_bytes(mapping: list[tuple[int, int]], dtype: torch.dtype) -> None:
    scales = [0.5, 0.03, 2.0]
    options = {"storage": torch.int8, "dtype": dtype, "scales": scales, "poison": dtype == FP8}
    session = encoded([14, 9], mapping, **options)
    pool, table = session.pool, session.table()
    assert pool.itemsize == 1
    stored = [session.read(table, 0, layer, 14) for layer in range(LAYERS)]
    gone = torch.ones(LAYERS, HEADS, 14, dtype=torch.bool)
    gone[..., [1, 4, 5, 10, 13]] = False
    pool.apply(CompactionPlan.from_eviction(pool.view(0), gone))
    pool.check_integrity()
    view, table = pool.view(0), session.table()
    head, row = np.array([1, 0, 1]), np.array([4, 2, 0])
    for layer, scale in enumerate(scales):
        sides = zip(
            stored[layer],
            session.read(table, 0, layer, 5),
            (view.keys, view.values),
            view.gather(layer, head, row),
            strict=True,
        )
        for before, after, read, gathered in sides:
            bytes_kept = before[:, [1, 4, 5, 10, 13]]
            assert torch.equal(after, bytes_kept)
            numbers = bytes_kept.contiguous().view(dtype).float() * scale
            assert torch.equal(
                torch.stack([read(layer, each) for each in range(HEADS)]).nan_to_num(99), numbers.nan_to_num(99)
            )
            assert torch.equal(gathered.nan_to_num(99), numbers[head, row].nan_to_num(99))


MANAGER: dict[str, Any] = {"num_layers": 3, "num_blocks": 8, "block_size": 32, "tokens_per_block": 4}
MANAGER |= {"max_blocks_per_seq": 6, "max_attention_window_size": 24, "sink_token_len": 0}


def made(
    memory: Tensor | None = None,
    mapping: list[tuple[int, int]] = SHARED,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> BlockPool:
    manager = KVCacheManager(**MANAGER | changes)
    manager.add_sequence(GenerationSequence(0, 0), 10)
    rows = torch.zeros(8, 3, 2, 2, 4, 4) if memory is None else memory
    return BlockPool([rows], torch.tensor(mapping), [manager], **options or {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"beam_width": 2}, "beam width 2"),
        ({"sink_token_len": 4}, "4 sink tokens"),
        ({"max_attention_window_size": 8}, "window of 8 tokens"),
    ],
)
def test_what_a_session_is_set_up_with_that_cannot_be_compacted_is_refused(change: dict[str, Any], reason: str) -> None:
    assert made().lengths(0).tolist() == [[0, 0]] * 3
    with pytest.raises(ConfigError, match=f"cannot be compacted: .*{reason}"):
        made(**change)


def test_layers_with_different_numbers_of_heads_are_refused() -> None:
    memories = [torch.zeros(8, 1, 2, heads, 4, 4) for heads in (2, 4)]
    managers: list[Any] = [SimpleNamespace(), SimpleNamespace()]
    with pytest.raises(ConfigError, match=r"KV heads, .*\[\(2, 4, 4\), \(4, 4, 4\)\]"):
        BlockPool(memories, torch.tensor([[0, 0], [1, 0]]), managers)


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"num_blocks": 7}, ValueError, r"\(7, 3, 4\)"),
        ({"num_layers": 2}, ValueError, r"\(8, 2, 4\)"),
        ({"tokens_per_block": 8}, ValueError, r"\(8, 3, 8\)"),
        ({"mapping": [(0, 0), (0, 1)]}, ValueError, "every place"),
        ({"mapping": [(0, 0), (0, 1), (0, 1)]}, ValueError, "every place"),
        ({"mapping": [(0, 0), (0, 1), (0, 2), (0, 2)]}, ValueError, "every place"),
        ({"memory": torch.zeros(8, 3, 1, 2, 4, 4)}, ValueError, "2, KV heads"),
        ({"memory": torch.zeros(8, 3, 2, 2, 4, 8)[..., ::2]}, ValueError, "contiguous"),
        ({"memory": torch.zeros(8, 3, 2, 2, 4, 4, dtype=torch.int8)}, TypeError, "INT8 and FP8"),
        ({"memory": torch.zeros(8, 3, 2, 2, 4, 4, dtype=torch.float64)}, TypeError, "float64"),
        ({"options": {"dtype": FP8, "scales": [1.0] * 3}}, TypeError, "does not hold"),
        ({"options": {"scales": [1.0] * 3}}, ValueError, "INT8 and FP8 have one each"),
        (
            {"memory": torch.zeros(8, 3, 2, 2, 4, 4, dtype=torch.int8), "options": {"dtype": FP8}},
            ValueError,
            "INT8 and FP8 have one each",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    change: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        made(**change)
