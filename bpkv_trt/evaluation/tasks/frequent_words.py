"""Frequent word extraction, RULER-style (NVIDIA/RULER, Apache-2.0): coded words whose frequencies follow Zipf's law."""

import math
import random

from bpkv_trt.evaluation.tasks.sample import Draft, Outline, Request, listing
from bpkv_trt.evaluation.tasks.words import distinct_letters

_ZETA_2 = math.pi**2 / 6  # rank k has the share k^-2 / zeta(2)
_TOKENS_PER_WORD_OF_VOCABULARY = 50
_FEWEST_WORDS = 60  # enough that ranks 2, 3, 4 and 5 differ in number


def fwe(rng: random.Random, request: Request) -> Outline:
    """The words of ranks 2 to 4; rank 1 is written as dots."""
    vocabulary = ["...", *distinct_letters(rng, max(9, request.tokens // _TOKENS_PER_WORD_OF_VOCABULARY), letters=6)]
    order = f"order {rng.random()}"

    def draft(units: int) -> Draft:
        words = [word for k, word in enumerate(vocabulary, start=1) for _ in range(int(units / k**2 / _ZETA_2))]
        random.Random(f"{order} {units}").shuffle(words)
        return Draft(
            variant="fwe",
            context="Read the following coded text and track the frequency of each coded word. Find the three most "
            f"frequently appeared coded words. {' '.join(words)}",
            question="Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?",
            lead="Answer: According to the coded text above, the three most frequently appeared words are:",
            answer=listing(vocabulary[1:4]),
        )

    return Outline(draft, smallest=_FEWEST_WORDS)
