"""Seeded words, in place of a dictionary that would have to be downloaded: of syllables, or from two short lists."""

import random
import string

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_LOWER = string.ascii_lowercase
_ADJECTIVES = (
    "amber ancient bold brave broken calm cheap clever cruel dry dull eager easy endless evil faithful famous fast "
    "fierce firm fresh frozen glad green hidden hollow honest hungry icy idle keen kind large light little long "
    "lucky mild modern narrow neat noble orange pale perfect poor proud pure purple raw red round royal sad serious "
    "sharp shiny short slow soft solid spare steady steep sweet swift tall tame thin tiny tough vast warm white "
    "wide wild wise wooden yellow young"
).split()
NOUNS = (
    "anchor apple bell bird boat book brother button castle chair circle cloud coat coin cup doctor dog door engine "
    "field finger fire fish forest fox gate glass hat hill horse hospital house key lake leaf letter library lion "
    "market moon mouse museum ocean office oven owl path picture planet plate radio rain ring river road rose salt "
    "school ship shop snake snow song soup station stone storm street student sugar teacher tower train tree wall "
    "wheel wind window winter wolf"
).split()
_PAIRS_USED = len(_ADJECTIVES) * len(NOUNS) // 2  # further keys have one more noun: finding new pairs gets slow


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
    """So many different keys of the form adjective-noun, as RULER has them; beyond some thousands adjective-noun-noun.

    Of two numbers the first keys are the same.
    """
    found: dict[str, None] = {}
    while len(found) < number:
        nouns = [rng.choice(NOUNS) for _ in range(1 if len(found) < _PAIRS_USED else 2)]
        found["-".join([rng.choice(_ADJECTIVES), *nouns])] = None
    return list(found)


def distinct_numbers(rng: random.Random, number: int, digits: int) -> list[str]:
    """So many different numbers of exactly `digits` digits."""
    found: dict[str, None] = {}
    while len(found) < number:
        found[str(rng.randrange(10 ** (digits - 1), 10**digits))] = None
    return list(found)
