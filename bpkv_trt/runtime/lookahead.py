"""A look ahead: the model drafts how it would go on, so that an eviction can be judged where its entries are needed."""

from collections.abc import Sequence
from dataclasses import dataclass

from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost


@dataclass(frozen=True)
class Draft:
    """What the model would have written at a logical position; complete where a stop token comes next."""

    start: int
    tokens: Sequence[int]
    complete: bool


def draft(host: TorchHost, sequence: int, count: int, stop_tokens: frozenset[int]) -> Draft:
    """Append the model's own greedy continuation, up to `count` tokens or a stop token.

    Nothing that observes the sequence sees them. Raises PoolExhausted where the pool has no room for `count` rows,
    with the sequence as it was.
    """
    host.pool.require_growth(sequence, count)
    start, tokens = len(host.tokens[sequence]), list[int]()
    logits = host.replay(sequence, 1).logits if count else None
    while logits is not None and len(tokens) < count:
        token = int(logits[0].argmax())
        if token in stop_tokens:
            return Draft(start, tokens, complete=True)
        tokens.append(token)
        logits = host.forward([Chunk(sequence, [token])], drafting=True)
    return Draft(start, tokens, complete=False)


def look_ahead(
    host: TorchHost, sequence: int, count: int, stop_tokens: frozenset[int], earlier: Draft | None = None
) -> None:
    """Append up to `count` tokens that may come, or twice as many.

    What is left of an `earlier` draft that has come true so far is taken up and continued. One that has not is still a
    guess at what the answer needs: its tokens follow those of a new draft.
    """
    if earlier is None:
        draft(host, sequence, count, stop_tokens)
        return
    came = host.tokens[sequence][earlier.start :]
    true = list(earlier.tokens[: len(came)]) == came
    if not true:
        draft(host, sequence, count, stop_tokens)
    rest = earlier.tokens[len(came) :] if true else earlier.tokens
    if rest:
        host.forward([Chunk(sequence, rest)], drafting=True)
    if true and not earlier.complete:
        draft(host, sequence, count - len(rest), stop_tokens)
