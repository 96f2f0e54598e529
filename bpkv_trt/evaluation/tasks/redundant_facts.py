"""The same fact twice, far apart: each copy alone can be spared, both cannot."""

import random

from bpkv_trt.evaluation.tasks.haystack import depths, hidden, noise_lines
from bpkv_trt.evaluation.tasks.sample import Draft, Outline, Request, listing
from bpkv_trt.evaluation.tasks.words import distinct_keys, distinct_numbers

_DISTRACTORS = 3
_FIRST, _SECOND = (0.05, 0.3), (0.65, 0.95)  # where the two copies may stand


def redundant_facts(rng: random.Random, request: Request) -> Outline:
    keys = distinct_keys(rng, 1 + _DISTRACTORS)
    values = distinct_numbers(rng, 1 + _DISTRACTORS, digits=5)
    key, value = keys[0], values[0]
    lines = [f"The code of {key} is {value}." for key, value in zip(keys, values, strict=True)]
    copies = [(rng.uniform(*_FIRST), lines[0]), (rng.uniform(*_SECOND), lines[0])]
    facts = sorted([*copies, *zip(depths(rng, _DISTRACTORS), lines[1:], strict=True)])

    def draft(units: int) -> Draft:
        return Draft(
            variant="redundant_facts-noise",
            context=f"Some codes are hidden within the following text. Remember them.\n"
            f"{hidden(noise_lines(units), facts)}",
            question=f"What is the code of {key}?",
            lead=f"According to the text above, the code of {key} is",
            answer=listing([value]),
        )

    return Outline(draft, smallest=20)
