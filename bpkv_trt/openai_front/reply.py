"""Answers in the two forms of OpenAI's API, whole or in parts."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from bpkv_trt.openai_front.server import Piece

Body = dict[str, Any]


class Reply(ABC):
    """To one request; what a form of them is called."""

    prefix: str
    whole_object: str
    part_object: str

    def __init__(self, model: str) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Piece]) -> Body:
        """Of all pieces of an answer."""
        last = pieces[-1]
        choice = self.whole_choice("".join(piece.text for piece in pieces))
        return self._with(self.whole_object, [_ended(choice, last)]) | {"usage": _usage(last)} | _kept(last)

    def opening(self) -> list[Body]:
        """What comes before all parts."""
        return []

    def part(self, piece: Piece) -> Body:
        """Of one piece of a stream."""
        return self._with(self.part_object, [_ended(self.part_choice(piece.text), piece)]) | _kept(piece)

    def usage(self, last: Piece) -> Body:
        """What ends a stream where it is asked for."""
        return self._with(self.part_object, []) | {"usage": _usage(last)}

    @abstractmethod
    def whole_choice(self, text: str) -> Body: ...

    @abstractmethod
    def part_choice(self, text: str) -> Body: ...

    def _with(self, kind: str, choices: list[Body]) -> Body:
        return {**self._head, "object": kind, "choices": choices}


class CompletionReply(Reply):
    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def whole_choice(self, text: str) -> Body:
        return {"text": text}

    def part_choice(self, text: str) -> Body:
        return {"text": text}


class ChatReply(Reply):
    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole_choice(self, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text}}

    def opening(self) -> list[Body]:
        speaker = {"delta": {"role": "assistant", "content": ""}}
        return [self._with(self.part_object, [_ended(speaker, Piece("", None, {}))])]

    def part_choice(self, text: str) -> Body:
        return {"delta": {"content": text}}


def _ended(choice: Body, piece: Piece) -> Body:
    return {"index": 0, **choice, "logprobs": None, "finish_reason": piece.finish_reason}


def _usage(last: Piece) -> Body:
    prompt, answer = last.numbers["bpkv_prompt_tokens"], last.numbers["bpkv_generated_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _kept(piece: Piece) -> Body:
    """What is ours beside OpenAI's, with the last piece: what became of the cache."""
    names = ("bpkv_entries_kept", "bpkv_entries_total", "bpkv_bytes_freed")
    return {name: piece.numbers[name] for name in names if name in piece.numbers}
