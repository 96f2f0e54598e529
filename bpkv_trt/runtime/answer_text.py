"""The text of an answer while its tokens come: given out as soon as it is certain."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes where bytes of a character are still to come


class AnswerText:
    """Tokens in, text out: never half of a character, and never a part of a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.stopped = False  # whether a stop string came
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._begin, self._end = 0, 0  # tokens given out last: what follows is decoded after them, as its spaces need
        self._held = ""  # may be the beginning of a stop string

    def add(self, token: int) -> str:
        """Take the next token; returns what can be given out, which is all of it once a stop string came."""
        self._tokens.append(token)
        return "" if self._decoded().endswith(INCOMPLETE) else self._release(self._new())

    def rest(self) -> str:
        """What is left when no more tokens come: without half of a character."""
        text = self._release(self._new().rstrip(INCOMPLETE))
        held, self._held = self._held, ""
        return text + held

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True))

    def _new(self) -> str:
        known = str(self._tokenizer.decode(self._tokens[self._begin : self._end], skip_special_tokens=True))
        new = self._decoded()[len(known) :]
        if new:
            self._begin, self._end = self._end, len(self._tokens)
        return new

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(place + len(each), place) for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, place = min(found)  # the first to be complete, however the text is cut into tokens
            return text[:place]
        certain = len(text) - max((_begun(text, each) for each in self._stop), default=0)
        self._held = text[certain:]
        return text[:certain]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of the text with which the stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
