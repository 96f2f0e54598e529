"""A look ahead: the model drafts how it would go on, so that an eviction can be judged where its entries are needed."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def draft(host: TorchHost, sequence: int, count: int, stop_tokens: frozenset[int]) -> Draft:
    """Append the model's own greedy continuation, up to `count` tokens or a stop token.

    Nothing that observes the sequence sees them. Raises PoolExhausted where the pool has no room for `count` rows,
    with the sequence as it was.
    """
    host.pool.require_growth(sequence, count)
    start, tokens = len(host.tokens[sequence]), list[int]()
    logits = host.replay(sequence, 1).logits if count else None
    while logits is not None and len(tokens) < count:
        if (token := int(logits[0].argmax())) in stop_tokens:
            return Draft(start, tokens, complete=True)
        tokens.append(token)
        logits = host.forward([Chunk(sequence, [token])], drafting=True)
    return Draft(start, tokens, complete=False)


def look_ahead(
    host: TorchHost, sequence: int, count: int, stop_tokens: frozenset[int], earlier: Draft | None = None
) -> tuple[float, ...]:
    """Append tokens that may come; returns the weight of each, relative to a token of the sequence.

    First comes a draft of up to `count` tokens, or what is left of an `earlier` one that has come true so far, and its
    continuation. Then an earlier draft that has not come true, as a further guess at what the answer needs.
    """
    came = [] if earlier is None else host.tokens[sequence][earlier.start :]
    true = earlier is not None and list(earlier.tokens[: len(came)]) == came
    begun = len(host.tokens[sequence])
    if earlier is not None and true:
        _append(host, sequence, earlier.tokens[len(came) :])
    if earlier is None or not true or not earlier.complete:
        draft(host, sequence, count - (len(host.tokens[sequence]) - begun), stop_tokens)
    drafted = len(host.tokens[sequence]) - begun
    guessed = () if earlier is None or true else earlier.tokens
    _append(host, sequence, guessed)
    return (1.0,) * drafted + (GUESS,) * len(guessed)


def _append(host: TorchHost, sequence: int, tokens: Sequence[int]) -> None:
    if tokens:
        host.forward([Chunk(sequence, tokens)], drafting=True)
