"""The full cache on one sample, computed once and shared by all that are compared on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bpkv_trt.evaluation.encoded import EncodedSample
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.remembered_statistics import Memory


@dataclass(frozen=True)
class Reference:
    """A sequence of an engine that evicts nothing, its prompt's first turn encoded, and how the full cache goes on."""

    engine: Engine
    sequence: int
    sample: EncodedSample
    logits: Tensor  # [1, V] after the first turn
    continuation: Sequence[int]  # after the lead, greedy, without the stop token
    log_probs: Tensor  # [n, V] fp32 predictions of the continuation's tokens from `first` on
    first: int  # the first of the continuation's tokens that is measured
    correct: tuple[bool, ...]  # by reference answer: every token of it is the full cache's own choice
    measured: tuple[bool, ...]  # by reference answer: whether it comes after the last compaction due
    memory: Memory = field(default_factory=Memory)  # what contenders find out about the whole cache


@contextmanager
def reference_of(
    engine: Engine, sample: EncodedSample, horizon: int, untouched: int, stop_tokens: frozenset[int]
) -> Iterator[Reference]:
    """Encode a sample's prompt on `engine` and let the full cache continue it by up to `horizon` tokens.

    engine: of a policy that evicts nothing, observing what every contender requires. `untouched`: decoded tokens,
    counted from the lead's first, before which some regime of the comparison has not compacted yet: predictions made
    from these are the same for all and are not measured.
    """
    sequence = engine.open(sample.prompt_tokens + len(sample.lead) + horizon)
    opened = [sequence]
    try:
        begun = logits = engine.encode([(sequence, sample.turns[0])])
        opened.append(full := engine.fork(sequence))
        for turn in sample.turns[1:]:
            logits = engine.encode([(full, turn)])
        if sample.lead:
            logits = engine.follow(full, sample.lead)[0][-1:]
        opened.append(other := engine.fork(full))
        correct = correct_references(torch.cat([logits, engine.follow(other, sample.answer)[0]]), sample)
        continuation, log_probs = _greedy(engine, full, logits, horizon, stop_tokens)
        for copy in (full, other):
            engine.close(copy)
            opened.remove(copy)
        begin = max(0, untouched + 1 - len(sample.lead))  # from here on every regime has compacted
        first = min(begin, len(continuation))
        late = tuple(where.start >= begin for where in sample.references)
        yield Reference(engine, sequence, sample, begun, continuation, log_probs[first:], first, correct, late)
    finally:
        for each in opened:
            engine.close(each)


def correct_references(logits: Tensor, sample: EncodedSample) -> tuple[bool, ...]:
    """By reference: whether greedy decoding would have written it, given all before it.

    logits [len(answer) + 1, V]: the predictions of the answer's tokens, then one that is not looked at.
    """
    chosen = logits[: len(sample.answer)].argmax(-1).tolist()
    return tuple(chosen[where] == list(sample.answer[where]) for where in sample.references)


def _greedy(
    engine: Engine, sequence: int, logits: Tensor, horizon: int, stop_tokens: frozenset[int]
) -> tuple[list[int], Tensor]:
    tokens, rows = list[int](), list[Tensor]()
    while len(tokens) < horizon and (token := int(logits[0].argmax())) not in stop_tokens:
        tokens.append(token)
        rows.append(torch.log_softmax(logits[0], dim=-1))
        if len(tokens) < horizon:
            logits = engine.decode([(sequence, [token])])
    vocabulary = logits.shape[-1]
    return tokens, torch.stack(rows) if rows else logits.new_zeros(0, vocabulary)
