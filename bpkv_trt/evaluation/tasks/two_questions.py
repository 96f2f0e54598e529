"""Two questions on one cache: it is compacted for the first and asked the second.

A query-aware method should fall on the second. Variant `first` is the same text and question, scored on the first.
"""

import random

from bpkv_trt.evaluation.tasks.haystack import depths, hidden, noise_lines
from bpkv_trt.evaluation.tasks.sample import Draft, Outline, Request, listing
from bpkv_trt.evaluation.tasks.words import distinct_keys, distinct_numbers

_FACTS = 4


def two_questions(rng: random.Random, request: Request) -> Outline:
    """`answers` are to the second question; with the variant `first` to the first, and no second is asked."""
    keys, values = distinct_keys(rng, _FACTS), distinct_numbers(rng, _FACTS, digits=5)
    lines = [f"The code of {key} is {value}." for key, value in zip(keys, values, strict=True)]
    facts = list(zip(depths(rng, _FACTS), lines, strict=True))
    first, second = rng.sample(range(_FACTS), 2)
    scores_first = request.variant == "first"
    scored = first if scores_first else second

    def draft(units: int) -> Draft:
        return Draft(
            variant=f"two_questions-noise-{'first' if scores_first else 'second'}",
            context=f"Some codes are hidden within the following text. Remember them.\n"
            f"{hidden(noise_lines(units), facts)}",
            question=f"What is the code of {keys[first]}?",
            question_after=None if scores_first else f"What is the code of {keys[second]}?",
            lead=f"According to the text above, the code of {keys[scored]} is",
            answer=listing([values[scored]]),
        )

    return Outline(draft, smallest=10)
