"""Long answers that follow a rule, for the generation regime: each number depends on what was written before.

Even seeds count in steps, where the last number is enough. Odd seeds write a chain of sums in which every value takes
up the one some places before: what is evicted too early is missed.
"""

import random
from collections.abc import Callable

from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.tasks.sample import Answer, Count, Draft, Outline, Request
from bpkv_trt.evaluation.tasks.sizing import largest

_LAG = 4  # places back to the value that is taken up


def counting(rng: random.Random, request: Request) -> Outline:
    """An answer of as many whole steps as `answer_tokens` hold."""
    whole = _steps(rng, request) if request.seed % 2 == 0 else _chain(rng, request)
    return Outline(lambda units: whole, smallest=0, grows=False)


def _steps(rng: random.Random, request: Request) -> Draft:
    step, start = rng.randint(2, 9), rng.randint(1, 50)

    def answer(length: int) -> Answer:
        written = Answer()
        for i in range(length):
            written = written.plus(" " if i == 0 else ", ").plus(str(start + i * step), reference=True)
        return written

    shown = ", ".join(str(start + i * step) for i in range(4))
    return Draft(
        variant="counting-steps",
        context=f"Count in steps of {step}, starting with {start}: {shown}, and so on.",
        question="Write down the numbers from the first one on, separated by commas, and do not stop.",
        lead=f"These are the numbers in steps of {step}, starting with {start}:",
        answer=_fitting(answer, request.count, request.answer_tokens),
        generation=True,
    )


def _chain(rng: random.Random, request: Request) -> Draft:
    step = rng.randint(1, 3)
    first = rng.sample(range(1, 30), _LAG)

    def answer(length: int) -> Answer:
        written, values = Answer(), list(first)
        for i in range(_LAG, _LAG + length):
            source = values[i - _LAG]
            values.append(source + step)
            written = written.plus(f" x{i + 1} = x{i + 1 - _LAG} + {step} = ").plus(str(source), reference=True)
            written = written.plus(f" + {step} = ").plus(str(values[i]), reference=True).plus(";")
        return written

    given = " ".join(f"x{i} = {value};" for i, value in enumerate(first, start=1))
    return Draft(
        variant="counting-chain",
        context=f"{given} Every further value is the value {_LAG} places before it plus {step}:{answer(1).joined}",
        question="Write down all values from x5 on in this form, and do not stop.",
        lead=f"Each value is the one {_LAG} places before it plus {step}, so these are the values: {given}",
        answer=_fitting(answer, request.count, request.answer_tokens),
        generation=True,
    )


def _fitting(answer: Callable[[int], Answer], count: Count, tokens: int) -> Answer:
    length = largest(lambda steps: count(answer(steps).joined), tokens, smallest=1)
    if length is None:
        raise InputError(
            f"answer_tokens is {tokens}, too few for one step of the task counting: it takes {count(answer(1).joined)}."
        )
    return answer(length)
