"""Seeded text whose continuation is known only to a model that remembers the context.

One generator serves the training of the two test models and the tests that ask them. Test prompts come from the
`*_prompt` functions, training examples from `training_example`; their random streams never meet, whatever the seeds.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KEYS = tuple(
    "lamp door river table bridge garden engine window ladder basket mirror candle hammer blanket pillow ticket "
    "bottle carpet drawer helmet kettle marble needle orchard pencil ribbon saddle tunnel violin wallet anchor "
    "barrel cabin desk easel fence gate harbor island jacket".split()
)
VALUES = tuple(
    "amber blue crimson silver golden violet scarlet ivory copper emerald indigo jade khaki lilac maroon navy "
    "olive peach ruby sepia teal umber white black coral azure beige bronze cherry cobalt cream cyan denim "
    "fawn ginger hazel lemon mint plum rust".split()
)
NUMBERS = tuple(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty".split()
)
PLACES = tuple("hill road forest valley field lake coast town market station".split())
NATURE = tuple("grass sky sun wind rain snow moon cloud".split())
MOODS = tuple("green bright cold warm quiet dark soft heavy slow calm".split())
FILLERS = ("here we go.", "there and back again.", "nothing more is known.", "and so it went on.")

_TOKEN = re.compile(r"[a-z]+|\d|[^\sa-z\d]|\n")
_PASSKEY_QUESTION = ("what is the pass key?", "the pass key is")
_WORDS_PER_LIST = 24


@dataclass(frozen=True)
class Exchange:
    """A question, the words the answer starts with (given to the model), and the answer that only memory can give."""

    question: str
    lead: str
    answer: str  # starts with a space, so that lead + answer is the text


@dataclass(frozen=True)
class Example:
    """A context and the questions asked of it."""

    context: str
    exchanges: tuple[Exchange, ...]

    def prompt(self, index: int = 0) -> tuple[str, str]:
        """The text up to the answer of one exchange (asked alone), and that answer."""
        exchange = self.exchanges[index]
        return f"{self.context} {exchange.question} {exchange.lead}", exchange.answer


def token_count(text: str) -> int:
    """Tokens of `text` under the test models' tokenizer: one per word, digit, mark and newline (no BOS)."""
    return len(_TOKEN.findall(text))


def recall_prompt(seed: int, tokens: int) -> tuple[str, str]:
    """One question about one of several facts hidden in noise: (prompt of at most `tokens` tokens with BOS, answer)."""
    return _example(recall, seed, tokens).prompt()


def redundant_prompt(seed: int, tokens: int) -> tuple[str, str]:
    """The same with the asked fact stated twice, far apart: evicting both copies is the fault to catch."""
    return _example(redundant, seed, tokens).prompt()


def two_questions(seed: int, tokens: int) -> Example:
    """One context, two questions about different facts in it: `prompt(0)` and `prompt(1)` ask them alone."""
    return _example(recall, seed, tokens)


def passkey_prompt(seed: int, tokens: int) -> tuple[str, str]:
    """A five-digit pass key in noise: (prompt, the digits)."""
    return _example(passkey, seed, tokens).prompt()


def induction_prompt(seed: int, tokens: int) -> tuple[str, str]:
    """A random word list in noise, whose first two words are given again: (prompt, the following words)."""
    return _example(induction, seed, tokens).prompt()


def counting_prompt(seed: int, tokens: int) -> tuple[str, str]:
    """Counting on from a number word after a context that does not matter: (prompt, the following number words)."""
    return _example(counting, seed, tokens).prompt()


def training_example(rng: random.Random, tokens: int) -> Example:
    """An example of a random kind for training, with up to eight questions so that most steps carry signal."""
    kinds = (recall, redundant, passkey, induction, counting)
    kind = rng.choices(kinds, weights=(8, 3, 3, 5, 1))[0]
    return kind(rng, tokens)


def recall(rng: random.Random, tokens: int) -> Example:
    """Facts `the code of KEY is VALUE.` among noise; questions about some of them in random order."""
    facts = rng.randint(2, max(2, min(16, tokens // 20)))
    keys = rng.sample(KEYS, facts)
    values = [rng.choice(VALUES) for _ in keys]
    order = rng.sample(range(facts), min(facts, 8))
    exchanges = tuple(_question(keys[i], values[i]) for i in order)
    return _hide(rng, [_fact(k, v) for k, v in zip(keys, values, strict=True)], exchanges, tokens)


def redundant(rng: random.Random, tokens: int) -> Example:
    """Like `recall`, but all facts are stated once and then, in another order, once more."""
    facts = rng.randint(2, max(2, min(8, tokens // 28)))
    keys = rng.sample(KEYS, facts)
    values = [rng.choice(VALUES) for _ in keys]
    statements = [_fact(k, v) for k, v in zip(keys, values, strict=True)]
    exchanges = tuple(_question(k, v) for k, v in zip(keys, values, strict=True))
    return _hide(rng, statements + rng.sample(statements, facts), exchanges, tokens)


def passkey(rng: random.Random, tokens: int) -> Example:
    """`the pass key is 48213. remember it. 48213 is the pass key.` in noise."""
    digits = "".join(rng.choice("0123456789") for _ in range(5))
    line = f"the pass key is {digits}. remember it. {digits} is the pass key."
    return _hide(rng, [line], (Exchange(*_PASSKEY_QUESTION, f" {digits}"),), tokens)


def induction(rng: random.Random, tokens: int) -> Example:
    """`list: A B C ... .` of random words in noise, then `say the list. list: A B` to be continued."""
    pool = KEYS + VALUES + NUMBERS + PLACES + NATURE + MOODS
    words = rng.sample(pool, min(_WORDS_PER_LIST, max(6, tokens // 3)))
    exchange = Exchange("say the list.", f"list: {words[0]} {words[1]}", "".join(f" {word}" for word in words[2:]))
    return _hide(rng, [f"list: {' '.join(words)}."], (exchange,), tokens)


def counting(rng: random.Random, tokens: int) -> Example:
    """`count from five. five six seven ...` up to twenty."""
    first = rng.randrange(len(NUMBERS) - 4)
    exchange = Exchange(
        f"count from {NUMBERS[first]}.", NUMBERS[first], "".join(f" {word}" for word in NUMBERS[first + 1 :])
    )
    return _hide(rng, [], (exchange,), tokens)


def repeated_words(rng: random.Random, tokens: int) -> Example:
    """A few random words, said over and over: the shortest lesson in looking up what came next."""
    words = rng.sample(KEYS + VALUES + NUMBERS + PLACES + NATURE + MOODS, rng.randint(6, 20))
    again = [words[i % len(words)] for i in range(tokens - 1 - len(words))]
    exchange = Exchange(again[0], again[1], "".join(f" {word}" for word in again[2:]))
    return Example(f" {' '.join(words)}", (exchange,))


def vocabulary() -> Iterator[str]:
    """Every word that the generator can write, in a fixed order without repeats."""
    rng = random.Random("words of the templates")
    lines = [_noise(rng) for _ in range(400)] + [*FILLERS, _fact("", ""), *_PASSKEY_QUESTION]
    lines += ["remember it. say the list. count from", "what is the code of it is"]
    seen = dict.fromkeys(KEYS + VALUES + NUMBERS + PLACES + NATURE + MOODS)
    seen.update(dict.fromkeys(re.findall(r"[a-z]+", " ".join(lines))))
    yield from seen


def sentence_starts() -> tuple[str, ...]:
    """Words that open a text or a line, where no space stands before them."""
    return (*NUMBERS, *"the we a here there nothing and what it list say count remember".split())


def _example(kind: Callable[[random.Random, int], Example], seed: int, tokens: int) -> Example:
    return kind(random.Random(f"test {kind.__name__} {seed}"), tokens)


def _fact(key: str, value: str) -> str:
    return f"the code of {key} is {value}."


def _question(key: str, value: str) -> Exchange:
    return Exchange(f"what is the code of {key}?", "it is", f" {value}")


def _noise(rng: random.Random) -> str:
    shape = rng.randrange(4)
    if shape == 0:
        return f"the {rng.choice(NATURE)} is {rng.choice(MOODS)}."
    if shape == 1:
        return f"we walk to the {rng.choice(PLACES)} near the {rng.choice(PLACES)}."
    if shape == 2:
        return f"a {rng.choice(MOODS)} {rng.choice(NATURE)} is over the {rng.choice(PLACES)}."
    return rng.choice(FILLERS)


def _hide(rng: random.Random, lines: list[str], exchanges: tuple[Exchange, ...], tokens: int) -> Example:
    """Fill `lines`, kept in order, with noise at random places so that the first prompt has at most `tokens` tokens."""
    question = exchanges[0]
    separator = rng.choice((" ", " ", "\n"))
    room = tokens - 1 - token_count(f"{question.question} {question.lead}")
    room -= sum(token_count(line + separator) for line in lines)
    noise: list[str] = []
    while (line := _noise(rng)) and (room := room - token_count(line + separator)) >= 0:
        noise.append(line)
    cuts = sorted(rng.randint(0, len(noise)) for _ in lines)
    sentences = list(noise)
    for cut, line in zip(reversed(cuts), reversed(lines), strict=True):
        sentences.insert(cut, line)
    return Example(separator.join(sentences), exchanges)
