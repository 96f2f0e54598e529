"""A sample as tokens: the prompt in its turns, the words given to the answer, and the answer that is known."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EncodedSample:
    """What one measurement is made on."""

    task: str
    variant: str
    seed: int
    turns: Sequence[Sequence[int]]  # the prompt; turns after the first are asked of the compacted cache
    lead: Sequence[int]  # the first tokens of the answer, given; a deferred compaction happens within them
    answer: Sequence[int] = ()  # what should follow the lead
    references: tuple[slice, ...] = ()  # where in `answer` the words stand that only memory can give

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.turns))
