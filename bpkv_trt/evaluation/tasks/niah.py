"""Needles in a haystack, RULER-style (NVIDIA/RULER, Apache-2.0): its wording, with noise or needles as haystack.

RULER's essays would have to be downloaded, so `-noise` in a variant says that noise stands in their place. The answer
begins in other words than RULER's (`... for KEY mentioned in the provided text is`), with the key close to its value,
and names every key again where several are asked for: models of 135M parameters then find the values more often.
"""

import random
from collections.abc import Sequence

from bpkv_trt.evaluation.tasks.haystack import depths, hidden, noise_lines
from bpkv_trt.evaluation.tasks.sample import Draft, Outline, Request, listing
from bpkv_trt.evaluation.tasks.words import distinct_keys, distinct_numbers

_DIGITS = 7


def needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def niah_single(rng: random.Random, request: Request) -> Outline:
    """One needle in noise."""
    return _in_noise(rng, "niah_single_1-noise", keys=1)


def niah_multikey(rng: random.Random, request: Request) -> Outline:
    """One of four keys is asked for; or, as variant `needle`, one of a haystack of keys."""
    if request.variant == "needle":
        return _among_needles(rng, "niah_multikey_2-needle")
    return _in_noise(rng, "niah_multikey_1-noise", keys=4)


def niah_multivalue(rng: random.Random, request: Request) -> Outline:
    """All four values of one key, in the order of the text."""
    return _in_noise(rng, "niah_multivalue-noise", keys=1, values=4)


def niah_multiquery(rng: random.Random, request: Request) -> Outline:
    """The values of four keys, named in the order of the text."""
    return _in_noise(rng, "niah_multiquery-noise", keys=4, queries=4)


def _in_noise(rng: random.Random, variant: str, keys: int, values: int = 1, queries: int = 1) -> Outline:
    names = [key for key in distinct_keys(rng, keys) for _ in range(values)]
    facts = list(zip(names, distinct_numbers(rng, len(names), _DIGITS), strict=True))
    rng.shuffle(facts)
    places = depths(rng, len(facts))
    asked = set(rng.sample(sorted(set(names)), queries))
    wanted = [(key, value) for key, value in facts if key in asked]
    needles = [(place, needle(*fact)) for place, fact in zip(places, facts, strict=True)]
    return Outline(lambda units: _draft(variant, hidden(noise_lines(units), needles), wanted), smallest=5)


def _among_needles(rng: random.Random, variant: str) -> Outline:
    fact = (distinct_keys(rng, 1)[0], distinct_numbers(rng, 1, _DIGITS)[0])
    place, others = rng.random(), f"distractors {rng.random()}"

    def draft(units: int) -> Draft:
        lines = [line for line in _distractors(others, units + 1) if f" {fact[0]} " not in line and fact[1] not in line]
        return _draft(variant, hidden(lines[:units], [(place, needle(*fact))]), [fact])

    return Outline(draft, smallest=3)


def _distractors(seed: str, number: int) -> list[str]:
    """Needles with other keys and values; the first ones stay the same whatever their number."""
    keys = distinct_keys(random.Random(f"{seed} keys"), number)
    values = distinct_numbers(random.Random(f"{seed} values"), number, _DIGITS)
    return [needle(*fact) for fact in zip(keys, values, strict=True)]


def _draft(variant: str, haystack: str, wanted: Sequence[tuple[str, str]]) -> Draft:
    one = len(wanted) == 1
    hint = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards."
        if one
        else "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz "
        "you about the numbers afterwards."
    )
    number, verb = ("number", "is") if one else ("numbers", "are")
    opening = "What is the" if one else "What are all the"
    keys = list(dict.fromkeys(key for key, _ in wanted))
    named = listing(keys).joined.strip(" .")
    values = [value for _, value in wanted]
    return Draft(
        variant=variant,
        context=f"{hint}\n{haystack}",
        question=f"{opening} special magic {number} for {named} mentioned in the provided text?",
        lead=f"The provided text mentions that the special magic {number} for {named} {verb}:",
        answer=listing(values, labels=[f"{key}: " for key in keys] if len(keys) > 1 else None),
    )
