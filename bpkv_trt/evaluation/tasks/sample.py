"""What a task asks, and what would be a right answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer, as text: nothing here depends on a model but the size of `context`.

    The prompt is `context`, an empty line, `question`; `question_after` is asked when the cache has been compacted.
    `lead` opens the answer and is given to the model; `joined` is what a right answer goes on with. It starts with a
    space, since `lead` ends in a word or a mark.
    """

    task: str
    variant: str  # what it really is, with the haystack: niah_multikey_2-needle
    seed: int
    context: str
    question: str | None
    question_after: str | None
    lead: str
    answers: tuple[str, ...]  # the references, in the order in which `joined` has them
    joined: str
    spans: tuple[tuple[int, int], ...]  # characters of the references within `joined`
    generation: bool = False  # a long answer after a short prompt: for the generation regime


@dataclass(frozen=True)
class Answer:
    """The text after the lead, and where in it the references are."""

    joined: str = ""
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(self.joined[start:end] for start, end in self.spans)

    def plus(self, text: str, reference: bool = False) -> "Answer":
        """The answer with `text` behind it, as one more reference or between two."""
        start, end = len(self.joined), len(self.joined) + len(text)
        return Answer(self.joined + text, (*self.spans, (start, end)) if reference else self.spans)


@dataclass(frozen=True)
class Draft:
    """A sample before its lead has the length asked for."""

    variant: str
    context: str
    question: str | None
    lead: str
    answer: Answer
    question_after: str | None = None
    generation: bool = False


@dataclass(frozen=True)
class Request:
    """What a caller asks of a task."""

    task: str
    variant: str | None  # the part of the name behind the colon
    seed: int
    tokens: int
    count: Count
    lead_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Outline:
    """A task settled but for its size: `draft(units)` is the sample with so many units of haystack.

    What a larger sample has more of is haystack alone, so its tokens never decrease with `units`.
    """

    draft: Callable[[int], Draft]
    smallest: int  # units below which the task makes no sense
    grows: bool = True  # False: there is one size only, `smallest`


def listing(references: Sequence[str], labels: Sequence[str] | None = None) -> Answer:
    """` a.`, ` a and b.`, ` a, b, and c.`: references in a sentence, each behind its label if there are labels."""
    answer = Answer()
    for i, reference in enumerate(references):
        label = "" if labels is None else labels[i]
        answer = answer.plus(_before(i, len(references)) + label).plus(reference, reference=True)
    return answer.plus(".")


def _before(index: int, length: int) -> str:
    if index == 0:
        return " "
    if index < length - 1:
        return ", "
    return " and " if length == 2 else ", and "
