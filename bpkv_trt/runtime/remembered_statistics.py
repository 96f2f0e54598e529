"""Statistics of a sequence that many configurations are tried on: what was found out once is not found out again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from bpkv_trt.core.rehearsal import Rehearsal
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.lookahead import Draft, Guess
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_statistics import TorchStatistics

Key = tuple[object, ...]
T = TypeVar("T")


@dataclass
class Memory:
    """What holds for every copy of one sequence of which nothing has been evicted, with the seconds that it took."""

    drafts: dict[Key, tuple[Draft, float]] = field(default_factory=dict)
    guesses: dict[Key, tuple[Guess, float]] = field(default_factory=dict)
    rehearsals: dict[Key, tuple[Rehearsal | None, float]] = field(default_factory=dict)
    statistics: dict[Key, tuple[ForwardStatistics, float]] = field(default_factory=dict)


class RememberedStatistics(TorchStatistics):
    """As `TorchStatistics`; what is taken from the memory is credited with the seconds that it took at first."""

    def __init__(self, memory: Memory, *arguments: Any, **options: Any) -> None:
        """`memory`, then what `TorchStatistics` takes."""
        super().__init__(*arguments, **options)
        self.memory = memory

    def draft_answer(self, sequence: int, count: int, trace: Trace) -> None:
        key = (self._length(sequence), count)
        draft_now = super().draft_answer

        def find() -> Draft:
            draft_now(sequence, count, trace)
            return self.drafts[sequence]

        self.drafts[sequence] = _once(self.memory.drafts, key, trace, find)

    def rehearse(self, sequence: int, count: int, trace: Trace) -> Rehearsal | None:
        if not self._whole(sequence):
            return super().rehearse(sequence, count, trace)
        key = (self._length(sequence), count, self.config.sinks)
        return _once(self.memory.rehearsals, key, trace, partial(super().rehearse, sequence, count, trace))

    @contextmanager
    def look_ahead(self, sequence: int, count: int, trace: Trace) -> Iterator[tuple[float, ...]]:
        earlier = self.drafts.get(sequence)
        drafted = None if earlier is None else tuple(earlier.tokens)
        key = (self._length(sequence), count, drafted)
        if not count or key not in self.memory.guesses:
            before = trace.seconds()["readout"]
            with super().look_ahead(sequence, count, trace) as weights:
                self.memory.guesses[key] = self.guesses[sequence], trace.seconds()["readout"] - before
                yield weights
            return
        guess, seconds = self.memory.guesses[key]
        trace.credit("readout", seconds)
        self.guesses[sequence] = guess
        before = self._length(sequence)
        try:
            if guess.tokens:
                self.host.forward([Chunk(sequence, guess.tokens)], drafting=True)
            yield guess.weights
        finally:
            self.host.retract(sequence, self._length(sequence) - before)

    def collect(self, sequence: int, positions: int, trace: Trace, drafted: Sequence[float] = ()) -> ForwardStatistics:
        if not self._whole(sequence):
            return super().collect(sequence, positions, trace, drafted)
        options = self.config.model_dump_json(exclude={"budget", "generation_budget", "regime"})
        key = (options, self._length(sequence), positions, tuple(drafted))
        find = partial(super().collect, sequence, positions, trace, drafted)
        return _once(self.memory.statistics, key, trace, find)

    def _length(self, sequence: int) -> int:
        return len(self.host.tokens[sequence])

    def _whole(self, sequence: int) -> bool:
        """Whether nothing of it was evicted."""
        rows = self.host.pool.lengths(sequence)[list(self.host.traits.compactable_layers)]
        return bool((rows == self._length(sequence)).all())


def _once(found: dict[Key, tuple[T, float]], key: Key, trace: Trace, find: Callable[[], T]) -> T:
    """What was found for the key, now or before; the seconds of the readout that it took count either way."""
    if key in found:
        trace.credit("readout", found[key][1])
    else:
        before = trace.seconds()["readout"]
        found[key] = find(), trace.seconds()["readout"] - before
    return found[key][0]
