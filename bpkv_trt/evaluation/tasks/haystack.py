"""Text that does not matter, and facts hidden in it."""

import random
from collections.abc import Sequence

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")


def noise_lines(sentences: int) -> list[str]:
    """RULER's noise: the five sentences over and over, five a line. The last line may be a shorter one."""
    whole, rest = divmod(sentences, len(NOISE))
    return [" ".join(NOISE)] * whole + ([" ".join(NOISE[:rest])] if rest else [])


def hidden(lines: Sequence[str], facts: Sequence[tuple[float, str]]) -> str:
    """The lines with every fact on a line of its own, at its depth: 0 before the first line, 1 after the last.

    `facts` are (depth, text) and appear in the order given, which must be that of their depths.
    """
    text: list[str] = []
    written = 0
    for depth, fact in facts:
        place = round(depth * len(lines))
        text += [*lines[written:place], fact]
        written = place
    return "\n".join([*text, *lines[written:]])


def depths(rng: random.Random, number: int) -> list[float]:
    """Random depths, ascending."""
    return sorted(rng.random() for _ in range(number))
