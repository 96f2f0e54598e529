"""Long answers that follow a rule, for the generation regime: each number depends on what was written before.

Even seeds add the same number again and again, where the last sum is enough. Odd seeds write a chain in which every
value takes up the one some places before: what is evicted too early is missed.
"""

import random
from collections.abc import Callable, Sequence

from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.tasks.sample import Answer, Count, Draft, Outline, Request
from bpkv_trt.evaluation.tasks.sizing import largest
from bpkv_trt.evaluation.tasks.words import NOUNS

_LAG = 4  # places back to the value that is taken up


def counting(rng: random.Random, request: Request) -> Outline:
    """An answer of as many whole steps as `answer_tokens` hold."""
    whole = _sums(rng, request) if request.seed % 2 == 0 else _chain(rng, request)
    return Outline(lambda units: whole, smallest=0, grows=False)


def _sums(rng: random.Random, request: Request) -> Draft:
    step, start = rng.randint(1, 3), rng.randint(1, 50)

    def answer(length: int) -> Answer:
        written = Answer()
        for value in range(start, start + length * step, step):
            written = written.plus(" ").plus(str(value), reference=True)
            written = written.plus(f" + {step} = ").plus(str(value + step), reference=True).plus(",")
        return written

    return Draft(
        variant="counting-sums",
        context=f"Start with {start} and add {step} again and again:{answer(3).joined} and so on.",
        question="Write down all the sums from the first one on, and do not stop.",
        lead="These are the sums, each beginning with the result of the one before:",
        answer=_fitting(answer, request.count, request.answer_tokens),
        generation=True,
    )


def _chain(rng: random.Random, request: Request) -> Draft:
    step, first = rng.randint(1, 2), rng.sample(range(2, 20), _LAG)
    nouns = rng.sample(NOUNS, len(NOUNS))

    def answer(length: int) -> Answer:
        written, values = Answer(), list(first)
        for i in range(_LAG, _LAG + length):
            source = values[i - _LAG]
            values.append(source + step)
            written = written.plus(f" {_name(nouns, i - _LAG)} = ").plus(str(source), reference=True)
            written = written.plus(f", {source} + {step} = ").plus(str(values[i]), reference=True)
            written = written.plus(f", so {_name(nouns, i)} = ").plus(str(values[i]), reference=True).plus(".")
        return written

    given = ", ".join(f"{_name(nouns, i)} = {value}" for i, value in enumerate(first))
    rule = f"the one {_LAG} places before it plus {step}"
    return Draft(
        variant="counting-chain",
        context=f"{given}. Every further value is {rule}.{answer(2).joined}",
        question=f"Write down all values from {_name(nouns, _LAG)} on in this form, and do not stop.",
        lead=f"Each value is {rule}, so we begin with {given}.",
        answer=_fitting(answer, request.count, request.answer_tokens),
        generation=True,
    )


def _name(nouns: Sequence[str], index: int) -> str:
    """A name of its own for every value, however many there are."""
    again, noun = divmod(index, len(nouns))
    return f"{nouns[noun]}{again + 1}" if again else nouns[noun]


def _fitting(answer: Callable[[int], Answer], count: Count, tokens: int) -> Answer:
    length = largest(lambda steps: count(answer(steps).joined), tokens, smallest=1)
    if length is None:
        raise InputError(
            f"answer_tokens is {tokens}, too few for one step of the task counting: it takes {count(answer(1).joined)}."
        )
    return answer(length)
