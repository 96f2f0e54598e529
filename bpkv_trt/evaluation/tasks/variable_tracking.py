"""Variable tracking, RULER-style (NVIDIA/RULER, Apache-2.0), in noise: one chain of four hops, one solved example.

The answer names the variables as the text does, `VAR ABCDE, VAR FGHIJ`, where RULER's leaves out `VAR` and the commas:
small models begin so, and a teacher-forced answer has to go the way the model would.
"""

import random
import string

from bpkv_trt.evaluation.tasks.haystack import depths, hidden, noise_lines
from bpkv_trt.evaluation.tasks.sample import Answer, Draft, Outline, Request
from bpkv_trt.evaluation.tasks.words import distinct_letters

_VARIABLES = 5
_MOST_OF_EXAMPLE = 60  # sentences of noise: with the chain about RULER's 500 tokens at most
_TOKENS_PER_SENTENCE_OF_EXAMPLE = 40  # the example takes about an eighth of a short prompt


def vt(rng: random.Random, request: Request) -> Outline:
    solved = _Chain(rng, letters=3)
    example = solved.prompt(min(_MOST_OF_EXAMPLE, request.tokens // _TOKENS_PER_SENTENCE_OF_EXAMPLE))
    chain = _Chain(rng, letters=5)
    before = f"{example}\n{solved.question} {solved.lead}{solved.answer.joined}\n\n\n"

    def draft(units: int) -> Draft:
        return Draft("vt-noise", before + chain.prompt(units), chain.question, chain.lead, chain.answer)

    return Outline(draft, smallest=5)


class _Chain:
    """`VAR A = 12345`, `VAR B = VAR A `, ...: one value under several names."""

    def __init__(self, rng: random.Random, letters: int) -> None:
        value = rng.randint(10000, 99998)
        names = distinct_letters(rng, _VARIABLES, letters, string.ascii_uppercase)
        sources = [str(value), *(f"VAR {name} " for name in names[:-1])]
        lines = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True)]
        self._facts = list(zip(depths(rng, _VARIABLES), lines, strict=True))
        self.question = f"Question: Find all variables that are assigned the value {value} in the text above."
        self.lead = (
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{_VARIABLES} variables are assigned the value {value}, they are:"
        )
        answer = Answer()
        for i, name in enumerate(names):
            answer = answer.plus(" VAR " if i == 0 else ", VAR ").plus(name, reference=True)
        self.answer = answer

    def prompt(self, sentences: int) -> str:
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{hidden(noise_lines(sentences), self._facts)}"
        )
