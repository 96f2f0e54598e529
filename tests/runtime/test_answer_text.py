"""Text that is given out while tokens come: all of it, nothing too early, nothing of a stop string."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.runtime.answer_text import AnswerText
from tests.runtime.conftest import TRAINED, loaded


def pieces(name: str, tokens: list[int], *stop: str) -> tuple[list[str], bool]:
    text, given_out = AnswerText(loaded(name).tokenizer, stop), list[str]()
    for token in tokens:
        given_out.append(text.add(token))
        if text.stopped:
            break
    return [*given_out, text.rest()], text.stopped


def decoded(name: str, tokens: list[int]) -> str:
    return str(loaded(name).tokenizer.decode(tokens, skip_special_tokens=True))


WRITTEN = st.text(st.sampled_from("ab .,é漢🙂\n\N{COMBINING ACUTE ACCENT}"), max_size=20)


@pytest.mark.parametrize("name", TRAINED)
def test_the_pieces_are_the_whole_and_no_piece_has_half_of_a_character(name: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(WRITTEN)
    def check(written: str) -> None:
        tokens = loaded(name).encoder.encode_raw(written)
        given_out, _ = pieces(name, tokens)
        assert "".join(given_out) == decoded(name, tokens)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in given_out)

    check()


def whole_characters(name: str) -> st.SearchStrategy[list[int]]:
    """Tokens in any order, special ones among them; those for single bytes only as they make up a character."""
    encoder, vocabulary = loaded(name).encoder, loaded(name).traits.vocabulary
    alone = [[token] for token in range(vocabulary) if "\N{REPLACEMENT CHARACTER}" not in decoded(name, [token])]
    spelt = [encoder.encode_raw(character)[-len(character.encode()) :] for character in "é漢🙂"]
    return st.lists(st.sampled_from([*alone, *spelt]), max_size=20).map(lambda parts: [*chain.from_iterable(parts)])


@pytest.mark.parametrize("name", TRAINED)
def test_tokens_one_by_one_give_what_all_of_them_do(name: str) -> None:
    @settings(max_examples=200, deadline=None)
    @given(whole_characters(name))
    def check(tokens: list[int]) -> None:
        assert "".join(pieces(name, tokens)[0]) == decoded(name, tokens)

    check()


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    tokens = loaded("tiny-llama").encoder.encode_raw("a🙂b")
    given_out, _ = pieces("tiny-llama", tokens)
    assert len(tokens) > 4 and [piece for piece in given_out if piece] == ["a", "🙂", "b"]
    assert "".join(pieces("tiny-llama", tokens[:-2])[0]) == "a"


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("ab 漢"), max_size=16),
    st.lists(st.text(st.sampled_from("ab 漢"), min_size=1, max_size=4), max_size=3),
)
def test_nothing_of_the_first_stop_string_is_given_out(written: str, stop: list[str]) -> None:
    """Whatever tokens it is spread over; what only looked like one comes in the end."""
    tokens = loaded("tiny-llama").encoder.encode_raw(written)
    text = decoded("tiny-llama", tokens)
    ends = []  # by where a stop string is complete: the first to be so ends the answer
    for each in stop:
        if (place := text.find(each)) >= 0:
            ends.append((place + len(each), place))
    given_out, stopped = pieces("tiny-llama", tokens, *stop)
    assert stopped == bool(ends)
    if not ends:
        assert "".join(given_out) == text
        return
    first = min(ends)[0]
    assert "".join(given_out) == text[: min(place for end, place in ends if end == first)]


def test_what_may_begin_a_stop_string_is_held_until_it_is_clear() -> None:
    tokens = loaded("tiny-llama").encoder.encode_raw("xENyEND z")
    given_out, stopped = pieces("tiny-llama", tokens, "END")
    assert stopped and "".join(given_out) == "xENy"
    assert given_out[: given_out.index("ENy") + 1][-3:] == ["", "", "ENy"]
