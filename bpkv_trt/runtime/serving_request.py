"""What a server is asked, and what it answers with, piece by piece."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bpkv_trt.errors import InputError, quoted
from bpkv_trt.models.conversation import Turn
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.request import LARGEST_PROMPT
from bpkv_trt.runtime.sampling import SamplingParams

Outcome = Literal["stop", "length", "cancelled", "timeout", "error", "refused"]
MOST_STOPS = 64
LONGEST_STOP = 1000  # characters, which may be held back until it is clear that no stop string begins there


@dataclass(frozen=True)
class ServingRequest:
    """One prompt, how to answer it, and what of `BpkvConfig` is different for it (`options`: budget, policy, ...)."""

    text: str = ""
    question: str | None = None  # put after the text before it is compacted
    raw: bool = False  # no chat template
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None  # of sampling; None: that of the configuration
    stop: tuple[str, ...] = ()  # strings that end the answer and are not part of it, beside the model's stop tokens
    ignore_eos: bool = False  # of the model: an answer as long as it was asked for, to measure by
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None  # from its submission to its end
    messages: tuple[Turn, ...] | None = None  # in place of the text: what was said, up to the answer

    def check(self) -> None:
        """Raise InputError for a value that no request can have; the rest is for those that know the model."""
        if not all(isinstance(name, str) for name in self.options):
            raise InputError(f"options is {quoted(self.options)}; give names of options and their values.")
        if self.messages is None:
            _check_text("text", self.text)
        else:
            self._check_messages(self.messages)
        if self.question is not None:
            _check_text("question", self.question)
        if not _is_whole(self.max_tokens):
            raise InputError(f"max_tokens is {quoted(self.max_tokens)}; give a whole number.")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**63):
            raise InputError(f"seed is {quoted(self.seed)}; give a whole number from 0 to 2^63 - 1.")
        for name, number in (("temperature", self.temperature), ("top_p", self.top_p)):
            _check_number(name, number)
        if self.timeout_s is not None:
            _check_number("timeout_s", self.timeout_s)
            if not 0 < self.timeout_s < float("inf"):
                raise InputError(f"timeout_s is {self.timeout_s}; give a positive number of seconds, or leave it out.")
        self._check_stop()

    def _check_messages(self, messages: tuple[Turn, ...]) -> None:
        _check_text("messages", "\n".join(turn.content for turn in messages))
        if self.text:
            raise InputError("There are both text and messages; give one of them.")
        if self.question is not None:
            raise InputError("A question is put after a text; beside messages, write it into the last one of the user.")
        if self.raw:
            raise InputError("Messages go through the model's chat template, which raw is to do without; give text.")

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(each, str) for each in self.stop):
            raise InputError(f"stop is {quoted(self.stop)}; give strings.")
        if len(self.stop) > MOST_STOPS:
            raise InputError(f"stop has {len(self.stop)} strings; give at most {MOST_STOPS}.")
        for each in self.stop:
            if not 0 < len(each) <= LONGEST_STOP:
                raise InputError(f"A string of stop has {len(each)} characters; give 1 to {LONGEST_STOP}.")

    @property
    def characters(self) -> int:
        """Of all texts."""
        said = () if self.messages is None else (turn.content for turn in self.messages)
        return sum(map(len, (self.text, self.question or "", *said)))

    def encoded(self, encoder: PromptEncoder, most_tokens: int) -> list[int]:
        """The prompt as token ids.

        Raises InputError and ModelError where the chat template does not take it, InputError also where it is certain
        before it is encoded that it has more than `most_tokens`.
        """
        if self.messages is not None:
            return encoder.encode_turns(self.messages, most_tokens=most_tokens)
        (prompt,) = encoder.encode(self.text, self.question, raw=self.raw, most_tokens=most_tokens)
        return prompt

    def sampling(self, stop_tokens: frozenset[int], seed: int) -> SamplingParams:
        """As asked for, by `seed` where no other is, and ended by the model's stop tokens unless they are ignored.

        Raises ConfigError.
        """
        ends = frozenset[int]() if self.ignore_eos else stop_tokens
        return SamplingParams(
            self.max_tokens, self.temperature, self.top_p, seed if self.seed is None else self.seed, ends
        )


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name} is {quoted(value)}; give text.")
    if not value.strip():
        raise InputError(f"{name} is empty; there is nothing to run a model on.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is no Unicode text: half a surrogate pair stands at {error.start}.") from None
    if size > LARGEST_PROMPT:
        raise InputError(f"{name} has {size} bytes; at most {LARGEST_PROMPT} are taken. Shorten it.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{name} is {quoted(value)}; give a number.")


@dataclass(frozen=True)
class ServingOutput:
    """A piece of an answer; the last one says why it ended and what was kept of the cache."""

    text: str  # what came since the last output: no half of a character, no part of a stop string
    tokens: int  # generated so far
    finish_reason: Outcome | None = None  # None while it goes on
    error: str | None = None  # one paragraph
    entries_kept: int = 0  # after the compaction of the prompt, or, without one, of the answer
    entries_total: int = 0  # before it
    bytes_freed: int = 0  # by all compactions
    prompt_tokens: int = 0
