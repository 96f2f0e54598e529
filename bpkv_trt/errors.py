"""Errors a user can meet. Every message says what happened, why, and what to do next."""

import reprlib

_QUOTED = 100  # characters
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _QUOTED


def quoted(value: object) -> str:
    """The value as Python writes it, cut to some 100 characters: what a file holds may be long, and nested deeply."""
    text = _SHORT.repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


class BpkvError(Exception):
    """A user's mistake or a limit of the machine; the command line prints it as one paragraph and exits with 2."""


class ConfigError(BpkvError):
    """An option, or a combination of options, that cannot be honoured."""


class InputError(BpkvError):
    """A prompt, file or token sequence that cannot be used."""


class ModelError(BpkvError):
    """A model that cannot be loaded or whose architecture is not covered."""


class PoolExhausted(BpkvError):
    """Not enough free pages; nothing was allocated."""


class QueueFull(BpkvError):
    """No further request is taken now: as many wait as may wait, or the server is shutting down. Later may do."""


class StalePlan(BpkvError):
    """A compaction plan made for another state of the sequence, or an invalid one; nothing was moved."""


class NumericalError(BpkvError):
    """The model produced NaN or Inf where a number is needed."""
