"""Compaction in place, whatever the order in which threads run. The interpreter runs them as one and shows no race.

The kernel's own loads, barriers and stores are recorded, and each row of a tile becomes a thread. Threads of a program
wait for each other at its barriers only, and those of two programs never.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from bpkv_trt.kernels.compact import TILE, compact
from tests.kernels.paged_caches import laid_out, random_rows

LENGTH, SCHEDULES = 6 * TILE, 20
KEPT = {
    "all but the first": np.arange(1, 3 * TILE),
    "every other": np.arange(0, LENGTH, 2),
    "a front and some later": np.concatenate([np.arange(TILE + 9), np.arange(2 * TILE, LENGTH, 3)]),
}

Event = tuple[str, np.ndarray | None]  # load or store, with the address of every lane's row (0: none); or a barrier
Tile = list[Event]
Program = list[Tile]  # one after the other


@dataclass
class Thread:
    program: int
    steps: deque[tuple[str, int]] = field(default_factory=deque)
    loaded: deque[int] = field(default_factory=deque)  # it stores what it loaded, in this order


def recorded(monkeypatch: pytest.MonkeyPatch, memory: list[torch.Tensor], launch: Callable[[], None]) -> list[Program]:
    """What every program of a launch does to `memory`."""
    builder, events = interpreter.interpreter_builder, defaultdict(list)

    def note(kind, pointers, mask):
        rows = np.where(mask.data, pointers.data, 0).astype(np.int64).reshape(len(pointers.data), -1)[:, 0]
        if any(each.data_ptr() <= rows.max() < each.data_ptr() + each.nbytes for each in memory):
            events[builder.grid_idx].append((kind, rows))

    def load(pointers, mask, *rest):
        note("load", pointers, mask)
        return original_load(pointers, mask, *rest)

    def store(pointers, value, mask, *rest):
        note("store", pointers, mask)
        return original_store(pointers, value, mask, *rest)

    original_load, original_store = builder.create_masked_load, builder.create_masked_store
    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", load)
        patch.setattr(builder, "create_masked_store", store)
        patch.setattr(builder, "create_barrier", lambda: events[builder.grid_idx].append(("barrier", None)))
        launch()
    return [in_tiles(each) for each in events.values()]


def in_tiles(events: list[Event]) -> Program:
    """A tile begins with the first load after stores."""
    tiles, before = [], "store"
    for event in events:
        if (before, event[0]) == ("store", "load"):
            tiles.append([])
        tiles[-1].append(event)
        before = event[0]
    return tiles


def threads_of(programs: list[Program]) -> list[Thread]:
    threads = []
    for index, program in enumerate(programs):
        for lane in range(TILE):
            steps = [(kind, 0 if rows is None else int(rows[lane])) for tile in program for kind, rows in tile]
            threads.append(Thread(index, deque(step for step in steps if step[0] == "barrier" or step[1])))
    return threads


def run(programs: list[Program], memory: dict[int, int], rng: random.Random) -> dict[int, int]:
    """The memory after one schedule: again and again some thread that need not wait takes its next steps."""
    memory, ready, waiting = dict(memory), threads_of(programs), defaultdict(list)
    while ready:
        thread = ready.pop(rng.randrange(len(ready)))
        for _ in range(rng.choice((1, 4, 100))):
            kind, address = thread.steps.popleft() if thread.steps else ("end", 0)
            if kind == "load":
                thread.loaded.append(memory[address])
            elif kind == "store":
                memory[address] = thread.loaded.popleft()
            else:
                break
        if kind == "barrier":
            waiting[thread.program].append(thread)
            if len(waiting[thread.program]) == TILE:
                ready += waiting.pop(thread.program)
        elif thread.steps:
            ready.append(thread)
    assert not waiting, "a thread waits for ever"
    return memory


def races(programs: list[Program]) -> int:
    """Pairs of accesses of two threads to one row, one of them a store, that no barrier orders.

    Without any, all schedules have the same result.
    """
    accesses = defaultdict(list)  # by address: (program, barriers passed, thread, kind)
    for number, thread in enumerate(threads_of(programs)):
        passed = 0
        for kind, address in thread.steps:
            passed += kind == "barrier"
            if address:
                accesses[address].append((thread.program, passed, number, kind))
    pairs = (pair for each in accesses.values() for pair in combinations(each, 2))
    return sum(
        "store" in (one[3], other[3]) and one[2] != other[2] and (one[0] != other[0] or one[1] == other[1])
        for one, other in pairs
    )


def without_barriers(programs: list[Program]) -> list[Program]:
    return [[[event for event in tile if event[0] != "barrier"] for tile in program] for program in programs]


def tiles_descending(programs: list[Program]) -> list[Program]:
    return [program[::-1] for program in programs]


def tiles_in_parallel(programs: list[Program]) -> list[Program]:
    return [[tile] for program in programs for tile in program]


@dataclass
class Case:
    programs: list[Program]
    before: dict[int, int]  # address of every row: what lies there
    after: dict[int, int]


@pytest.fixture(params=KEPT)
def case(request, monkeypatch, device) -> Case:
    """A compaction of two heads, as recorded and as it should end."""
    if device.type != "cpu":
        pytest.skip("records what the interpreter does")
    kept = [KEPT[request.param], KEPT["every other"]]
    rows = random_rows([[LENGTH, LENGTH]], torch.float16, 16)
    laid = laid_out(rows, rows, device)
    positions = torch.zeros(laid.memory[0].shape[0], 16, dtype=torch.int32)
    offsets = torch.tensor([0, len(kept[0]), len(kept[0]) + len(kept[1])])
    flat = torch.from_numpy(np.concatenate(kept)).int()
    memory = [*laid.memory, positions]
    programs = recorded(monkeypatch, memory, lambda: compact(flat, offsets, laid.cache, positions))

    def address(array, head, row):
        page = int(laid.cache.key_pages[0, head, row // 16]) + laid.cache.first_page
        return array.data_ptr() + (page * 16 + int(row) % 16) * (array.nbytes // positions.numel())

    places = [(array, head) for array in memory for head in range(2)]
    before = {address(*place, row): address(*place, row) for place in places for row in range(LENGTH)}
    moved = {address(*place, i): address(*place, row) for place in places for i, row in enumerate(kept[place[1]])}
    return Case(programs, before, before | moved)


def test_no_schedule_of_the_kernel_spoils_a_row(case):
    assert len(case.programs) == 2 and max(map(len, case.programs)) >= 3
    assert races(case.programs) == 0
    for seed in range(SCHEDULES):
        assert run(case.programs, case.before, random.Random(seed)) == case.after


@pytest.mark.parametrize("fault", [without_barriers, tiles_descending, tiles_in_parallel])
def test_any_other_order_does(case, fault):
    faulty = fault(case.programs)
    assert any(run(faulty, case.before, random.Random(seed)) != case.after for seed in range(SCHEDULES))
    assert fault is tiles_descending or races(faulty)
