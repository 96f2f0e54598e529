"""An answer's tokens, and which of them are the references."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class AnswerTokens:
    """Ids to be given to a model after the prompt, without special tokens: first `lead_ids`, then `ids`."""

    lead_ids: list[int]
    ids: list[int]
    spans: tuple[tuple[int, int], ...]  # per reference: its tokens ids[start:end]


def answer_tokens(
    tokenizer: "PreTrainedTokenizerBase", lead: str, joined: str, spans: Sequence[tuple[int, int]]
) -> AnswerTokens:
    """Tokens of `lead` and of `joined`, which follows it; `spans` are characters of the references within `joined`.

    The lead's ids are those of the lead alone, so they tell nothing of the answer. The answer's ids are those it has
    behind the lead where the tokens of both texts part between them, as they do in general, since `joined` begins with
    a space. Otherwise they are those of `joined` alone, with its space. A token belongs to a reference when they share
    a character: a space before a number is the number's only where one token holds both.
    """
    lead_ids = _encoded(tokenizer, lead)
    whole = _encoded(tokenizer, lead + joined)
    if whole[: len(lead_ids)] == lead_ids:
        text, before = lead + joined, len(lead_ids)
    else:
        text, before, whole = joined, 0, _encoded(tokenizer, joined)
    start = len(text) - len(joined)
    offsets = _offsets(tokenizer, text, whole)[before:]
    return AnswerTokens(
        lead_ids, whole[before:], tuple(_tokens_of(first + start, last + start, offsets) for first, last in spans)
    )


def _encoded(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _offsets(tokenizer: "PreTrainedTokenizerBase", text: str, ids: list[int]) -> list[tuple[int, int]]:
    """Characters of each token within `text`: from the tokenizer, or, where it is a slow one, from decoded prefixes."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(int(first), int(last)) for first, last in encoded["offset_mapping"]]
    decoded = [
        len(tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False)) for length in range(len(ids) + 1)
    ]
    lost = len(text) - decoded[-1]  # a space at the very beginning
    return [(first + lost, last + lost) for first, last in zip(decoded, decoded[1:], strict=False)]


def _tokens_of(first: int, last: int, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The tokens that share a character with text[first:last]."""
    found = [i for i, (begin, end) in enumerate(offsets) if begin < last and end > first]
    return found[0], found[-1] + 1
