"""A look ahead: the model drafts how it would go on, so that an eviction can be judged where its entries are needed."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost

GUESS = 0.1  # the weight of what is less likely to come: enough for what it alone needs, little for all else


@dataclass(frozen=True)
class Draft:
    """What the model would have written at a logical position; complete where a stop token comes next."""

    start: int
    tokens: Sequence[int]
    complete: bool


@dataclass(frozen=True)
class Guess:
    """Tokens that may follow a sequence, and the weight of each relative to a token of its own."""

    tokens: Sequence[int]
    weights: tuple[float, ...]


def draft(host: TorchHost, sequence: int, count: int, stop_tokens: frozenset[int], choice: int = 0) -> Draft:
    """Append the model's own greedy continuation, up to `count` tokens or a stop token; it begins with the most
    probable token, or with the one that `choice` others exceed.

    Nothing that observes the sequence sees them. Raises PoolExhausted where the pool has no room for `count` rows,
    with the sequence as it was.
    """
    host.pool.require_growth(sequence, count)
    start, tokens = len(host.tokens[sequence]), list[int]()
    logits = host.replay(sequence, 1).logits if count else None
    while logits is not None and len(tokens) < count:
        token = _next(logits[0], 0 if tokens else choice)
        if token in stop_tokens:
            return Draft(start, tokens, complete=True)
        tokens.append(token)
        logits = host.forward([Chunk(sequence, [token])], drafting=True)
    return Draft(start, tokens, complete=False)


def look_ahead(
    host: TorchHost,
    sequence: int,
    count: int,
    alternatives: int,
    stop_tokens: frozenset[int],
    earlier: Draft | None = None,
) -> tuple[float, ...]:
    """Append tokens that may come; returns the weight of each, relative to a token of the sequence.

    First comes a draft of up to `count` tokens, or what is left of an `earlier` one that has come true so far, and its
    continuation. Then, as further guesses at what the answer needs and at a tenth of the weight, an earlier draft that
    has not come true, and `alternatives` of half the length that begin with the next most probable tokens.
    """
    came = [] if earlier is None else host.tokens[sequence][earlier.start :]
    true = earlier is not None and list(earlier.tokens[: len(came)]) == came
    guesses = [] if earlier is None or true else [earlier]
    for choice in range(1, alternatives + 1):
        guesses.append(draft(host, sequence, count // 2, stop_tokens, choice))
        host.retract(sequence, len(guesses[-1].tokens))
    begun = len(host.tokens[sequence])
    if earlier is not None and true:
        _append(host, sequence, earlier.tokens[len(came) :])
    if earlier is None or not true or not earlier.complete:
        draft(host, sequence, count - (len(host.tokens[sequence]) - begun), stop_tokens)
    drafted = len(host.tokens[sequence]) - begun
    guessed = [token for guess in guesses for token in guess.tokens]
    _append(host, sequence, guessed)
    return (1.0,) * drafted + (GUESS,) * len(guessed)


def _next(logits: Tensor, choice: int) -> int:
    # The token of logits [V] that `choice` others exceed. Half types often have ties: as in argmax the lower one wins.
    return int(logits.argsort(descending=True, stable=True)[choice] if choice else logits.argmax())


def _append(host: TorchHost, sequence: int, tokens: Sequence[int]) -> None:
    if tokens:
        host.forward([Chunk(sequence, tokens)], drafting=True)
