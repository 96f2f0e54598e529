"""The prompts of a profile: pieces of a long text, of so many tokens each."""

import pydoc_data.topics
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from bpkv_trt.errors import InputError
from bpkv_trt.latency.profile import Profile
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.request import read_prompt


def prompts(loaded: LoadedModel, profile: Profile, lengths: Sequence[int]) -> list[str]:
    """One text after another, each of so many tokens, BOS counted, or of few less where one more letter takes several.

    Raises InputError where the model or the text has no room for them.
    """
    longest, known = max(lengths), loaded.traits.max_positions
    if longest + profile.answer_tokens > known:
        raise InputError(
            f"The profile has {longest} tokens of prompt and {profile.answer_tokens} of answer, and {profile.model} "
            f"knows {known} positions; give fewer."
        )
    return list(_pieces(loaded.encoder, _text(profile), lengths))


def _text(profile: Profile) -> str:
    if profile.prompt_file is not None:
        return read_prompt(profile.prompt_file, flag="prompt_file")
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def _pieces(encoder: PromptEncoder, text: str, lengths: Sequence[int]) -> Iterator[str]:
    start = 0
    for place, tokens in enumerate(lengths):
        size = 2 * tokens  # letters, of a long text no more than are of use
        while (found := _tokens(encoder, text[start : start + size])) < tokens:
            if start + size >= len(text):
                raise InputError(
                    f"The text for prompts ends after {sum(lengths[:place]) + found} tokens of this model, and "
                    f"{sum(lengths)} are asked for (prompt_tokens is {max(lengths)}); give fewer, or a longer text as "
                    "prompt_file."
                )
            size *= 2
        fitting = bisect_right(range(size + 1), tokens, key=lambda end: _tokens(encoder, text[start : start + end])) - 1
        yield text[start : start + fitting]
        start += fitting


def _tokens(encoder: PromptEncoder, text: str) -> int:
    (tokens,) = encoder.encode(text, raw=True)
    return len(tokens)
