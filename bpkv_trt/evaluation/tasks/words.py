"""Seeded words made of syllables, in place of a dictionary that would have to be downloaded."""

import random
import string

LOWER = string.ascii_lowercase
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


def distinct_words(rng: random.Random, number: int, syllables: int = 3) -> list[str]:
    """So many different words of a consonant and a vowel per syllable."""
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))] = None
    return list(found)


def distinct_letters(
    rng: random.Random, number: int, letters: int, alphabet: str = string.ascii_lowercase
) -> list[str]:
    """So many different words of random letters."""
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(rng.choice(alphabet) for _ in range(letters))] = None
    return list(found)


def distinct_keys(rng: random.Random, number: int) -> list[str]:
    """Keys in the form adjective-noun, no word of which occurs twice."""
    words = distinct_words(rng, 2 * number, syllables=2)
    return [f"{first}-{second}" for first, second in zip(words[::2], words[1::2], strict=True)]


def distinct_numbers(rng: random.Random, number: int, digits: int) -> list[str]:
    """So many different numbers of exactly `digits` digits."""
    found: dict[str, None] = {}
    while len(found) < number:
        found[str(rng.randrange(10 ** (digits - 1), 10**digits))] = None
    return list(found)
