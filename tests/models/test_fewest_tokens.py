"""The least number of tokens that a text has is never more than it has, with tokenizers of every kind."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from bpkv_trt.errors import InputError
from bpkv_trt.models.fewest_tokens import BYTE_LEVEL, FewestTokens
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.models.tokenizers import load_tokenizer
from tests.serving.conftest import TINY

MARKED = "\N{GREEK SMALL LETTER ALPHA}\u0313\u0300\u0345"  # NFC composes the four to one
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def merging(vocabulary: list[str], *words: str, **options: bool) -> models.BPE:
    """A model that has these words, put together from left to right, beside the vocabulary."""
    merges, vocabulary = list[tuple[str, str]](), list(vocabulary)
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return models.BPE({word: place for place, word in enumerate(vocabulary)}, merges, **options)


def byte_level(*left_out: int) -> Tokenizer:
    spelling = "".join(BYTE_LEVEL[byte] for byte in normalizers.NFC().normalize_str(MARKED).encode())
    alphabet = [word for byte, word in BYTE_LEVEL.items() if byte not in left_out]
    core = Tokenizer(merging(alphabet, spelling, "\u0120\u0120\u0120", "abc"))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return core


def byte_fallback() -> Tokenizer:
    return Tokenizer(merging([*FALLBACK, *"\u2581abc"], "\u2581\u2581\u2581", "abc", byte_fallback=True))


def unigram(byte_fallback: bool = True) -> Tokenizer:
    pieces = [(word, -5.0) for word in ("<unk>", *FALLBACK, "\u2581", "a", "abc", "\u2581\u2581\u2581")]
    core = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    return core


def with_normalizer(core: Tokenizer, normalizer: normalizers.Normalizer) -> Tokenizer:
    core.normalizer = normalizer
    return core


def with_splitter(core: Tokenizer, *splitters: pre_tokenizers.PreTokenizer) -> Tokenizer:
    core.pre_tokenizer = pre_tokenizers.Sequence([*splitters, ByteLevel(add_prefix_space=False)])
    return core


def with_token(core: Tokenizer, token: AddedToken) -> Tokenizer:
    core.add_tokens([token])
    return core


LLAMA = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "some bytes missing": lambda: byte_level(0x04, 0xF0),
    "composing": lambda: with_normalizer(byte_level(), normalizers.NFC()),
    "composing all": lambda: with_normalizer(
        byte_level(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "split": lambda: with_splitter(byte_level(), pre_tokenizers.Digits(), pre_tokenizers.Split(" ", "isolated")),
    "byte fallback": lambda: with_normalizer(byte_fallback(), LLAMA),
    "unigram": unigram,
    "an added token": lambda: with_token(with_normalizer(byte_fallback(), LLAMA), AddedToken("bbbb", normalized=True)),
    "a real one": lambda: load_tokenizer(str(TINY)).tokenizer.backend_tokenizer,
}


def wrapped(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core)


def tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


PARTS = st.sampled_from([MARKED, "a", "abc", " ", "   ", "bbbb", "\x04", "\U0001f600", "\u6f22", "<0x0A>", "\ufb03"])
TEXTS = st.lists(st.tuples(PARTS | st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 40)), max_size=5)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_never_has_fewer_tokens(name: str) -> None:
    tokenizer = wrapped(BOUNDED[name]())
    fewest = FewestTokens(tokenizer)
    assert fewest("a" * 1000) >= 1000 / 52, "a bound that says nothing"

    @settings(max_examples=100, deadline=None)
    @given(TEXTS)
    def check(parts: list[tuple[str, int]]) -> None:
        text = "".join(part * count for part, count in parts)
        assert fewest(text) <= tokens(tokenizer, text)

    check()
    for repeated in (MARKED, "\x04", "\U0001f600"):
        assert fewest(repeated * 1000) <= tokens(tokenizer, repeated * 1000)


def fused() -> Tokenizer:
    return Tokenizer(merging(["<unk>", *"abc"], fuse_unk=True, unk_token="<unk>"))


UNBOUNDED: dict[str, tuple[Callable[[], Tokenizer], str]] = {  # each with a text that comes to hardly any token
    "strip": (lambda: with_normalizer(byte_level(), normalizers.Strip()), " " * 1000),
    "accents": (lambda: with_normalizer(byte_level(), normalizers.StripAccents()), "\u0301" * 1000),
    "control characters": (lambda: with_normalizer(byte_level(), normalizers.Nmt()), "\x01" * 1000),
    "replaced": (lambda: with_normalizer(byte_level(), normalizers.Replace("aa", "a")), "a" * 1000),
    "replaced by a pattern": (
        lambda: with_normalizer(byte_level(), normalizers.Replace(Regex(" +"), " ")),
        " " * 1000,
    ),
    "one of several": (
        lambda: with_normalizer(byte_level(), normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        " " * 1000,
    ),
    "spaces dropped": (lambda: with_splitter(byte_level(), pre_tokenizers.WhitespaceSplit()), " " * 1000),
    "splits dropped": (lambda: with_splitter(byte_level(), pre_tokenizers.Split("b", "removed")), "b" * 1000),
    "missing bytes after a normalizer": (
        lambda: with_normalizer(byte_level(0xC3, 0x85), normalizers.NFC()),
        "A\N{COMBINING RING ABOVE}" * 500,
    ),
    "unknown characters": (fused, "z" * 1000),
    "unknown pieces": (lambda: unigram(byte_fallback=False), "z" * 1000),
    "unknown words": (lambda: Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "z" * 1000),
    "spaces swallowed": (lambda: with_token(byte_level(), AddedToken("<m>", lstrip=True)), " " * 1000 + "<m>"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_said_where_any_number_of_characters_may_come_to_nothing(name: str) -> None:
    core, text = UNBOUNDED[name]
    tokenizer = wrapped(core())
    assert FewestTokens(tokenizer)(text) == 0 and tokens(tokenizer, text) <= len(text) / 2


def test_bytes_are_spelt_as_the_library_spells_them() -> None:
    splitter = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in (*map(chr, range(0x80)), "\u07ff", "\u0fff\uffff", "\U0001f600", "\U000c0000"):
        ((spelt, _),) = splitter.pre_tokenize_str(text)
        assert spelt == "".join(BYTE_LEVEL[byte] for byte in text.encode())
    assert set(BYTE_LEVEL.values()) == set(ByteLevel.alphabet())


def test_a_prompt_that_is_certain_to_be_too_long_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one that may not be is encoded."""
    tokenizer = wrapped(byte_level())
    encoder = PromptEncoder(tokenizer)
    assert len(encoder.encode("abc" * 100, raw=True, most_tokens=100)[0]) == 100
    assert len(encoder.encode("b" * 300, raw=True, most_tokens=100)[0]) == 300, "nobody knows before"

    def encode(*_: object, **__: object) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", encode)
    with pytest.raises(InputError, match="301 characters, which are 101 tokens or more, and at most 100"):
        encoder.encode("abc" * 100 + "a", raw=True, most_tokens=100)
