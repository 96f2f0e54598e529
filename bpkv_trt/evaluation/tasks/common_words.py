"""Common word extraction, RULER-style (NVIDIA/RULER, Apache-2.0), with words made of syllables."""

import random
from collections.abc import Sequence

from bpkv_trt.evaluation.tasks.sample import Answer, Draft, Outline, Request
from bpkv_trt.evaluation.tasks.words import distinct_words

_COMMON = 10
_SHORT = 4096  # tokens below which RULER repeats its words less often
_HINT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often."
)
_QUESTION = "Question: What are the 10 most common words in the above list?"
_LEAD = "Answer: The top 10 words that appear most often in the list are:"


def cwe(rng: random.Random, request: Request) -> Outline:
    """The ten words that are repeated more often, in the order in which the list first has them."""
    short = request.tokens < _SHORT
    often, seldom = (6, 1) if short else (30, 3)
    syllables = 2 if short else 3
    words, *example_repeats = (20, 3, 1) if short else (40, 10, 3)
    solved, solved_common = _listed(rng, distinct_words(rng, words, syllables), *example_repeats)
    before = f"{_HINT}\n{solved}\n{_QUESTION} {_LEAD}{_numbered(solved_common).joined}\n\n\n"
    vocabulary = f"words {rng.random()}"

    def draft(units: int) -> Draft:
        chosen = distinct_words(random.Random(vocabulary), _COMMON + units, syllables)
        text, common = _listed(random.Random(f"{vocabulary} {units}"), chosen, often, seldom)
        return Draft("cwe", f"{before}{_HINT}\n{text}", _QUESTION, _LEAD, _numbered(common))

    return Outline(draft, smallest=_COMMON)


def _listed(rng: random.Random, words: Sequence[str], often: int, seldom: int) -> tuple[str, list[str]]:
    """The numbered list, the first ten words `often`, the others `seldom`; and those ten as they first appear."""
    common = words[:_COMMON]
    all_of_them = [*common] * often + [*words[_COMMON:]] * seldom
    rng.shuffle(all_of_them)
    text = " ".join(f"{i}. {word}" for i, word in enumerate(all_of_them, start=1))
    return text, sorted(common, key=all_of_them.index)


def _numbered(words: Sequence[str]) -> Answer:
    answer = Answer()
    for i, word in enumerate(words, start=1):
        answer = answer.plus(f" {i}. ").plus(word, reference=True)
    return answer
