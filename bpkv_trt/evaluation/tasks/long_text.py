"""A long real text that every machine has: pages of CPython's own documentation, with a question about one of them.

The pages are those of the Python that runs, so the variant names its version. There is no reference answer: what is
measured is how far the distribution of the continuation moves.
"""

import itertools
import pydoc_data.topics
import random
import sys
from collections.abc import Sequence

from bpkv_trt.evaluation.tasks.sample import Answer, Draft, Outline, Request

_CHARACTERS_PER_TOKEN = 1.2  # pages longer than so many per token of the prompt are left out: several are to fit
_FEWEST_PAGES = 8


def long_text(rng: random.Random, request: Request) -> Outline:
    asked, *others = _pages(rng, request.tokens)
    title = asked.partition("\n")[0].strip()
    place = rng.random()

    def draft(units: int) -> Draft:
        return Draft(
            variant=f"long_text-python{sys.version_info.major}.{sys.version_info.minor}",
            context=_with_page(asked, others, units, place),
            question=f"What does the section '{title}' of the documentation above say?",
            lead=f"According to the section '{title}' of the documentation above,",
            answer=Answer(),
        )

    return Outline(draft, smallest=0)


def _pages(rng: random.Random, tokens: int) -> list[str]:
    """Pages in a random order, the asked one first."""
    pages = sorted(pydoc_data.topics.topics.values(), key=lambda page: (len(page), page))
    fitting = [page for page in pages if len(page) <= _CHARACTERS_PER_TOKEN * tokens]
    chosen = fitting if len(fitting) >= _FEWEST_PAGES else pages[:_FEWEST_PAGES]
    return rng.sample(chosen, len(chosen))


def _with_page(asked: str, others: Sequence[str], lines: int, place: float) -> str:
    """`lines` lines of the other pages, over and over if there are too few, and between two pages the asked one."""
    text: list[str] = []
    boundary = 0
    for page in itertools.cycle(others):
        if len(text) <= place * lines:
            boundary = len(text)
        if len(text) >= lines:
            break
        text += [*page.strip().splitlines(), ""]
    return "\n".join([*text[:boundary], *asked.strip().splitlines(), "", *text[boundary:lines]]).rstrip("\n")
