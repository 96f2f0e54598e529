"""A five-digit pass key in noise, at a depth swept by the seed."""

import random

from bpkv_trt.evaluation.tasks.haystack import hidden, noise_lines
from bpkv_trt.evaluation.tasks.sample import Draft, Outline, Request, listing
from bpkv_trt.evaluation.tasks.words import distinct_numbers

_DEPTHS = 11


def passkey_depth(seed: int) -> float:
    """Where the pass key of a seed stands: 0, 0.1, ... 1 of the haystack, over and over."""
    return seed % _DEPTHS / (_DEPTHS - 1)


def passkey(rng: random.Random, request: Request) -> Outline:
    (key,) = distinct_numbers(rng, 1, digits=5)
    line = f"The pass key is {key}. Remember it. {key} is the pass key."
    facts = [(passkey_depth(request.seed), line)]

    def draft(units: int) -> Draft:
        return Draft(
            variant="passkey-noise",
            context=hidden(noise_lines(units), facts),
            question="What is the pass key?",
            lead="The pass key that is hidden in the text above, and that I was told to remember, is",
            answer=listing([key]),
        )

    return Outline(draft, smallest=5)
