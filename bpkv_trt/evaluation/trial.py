"""One contender on one sample: the cache compacted its way, then fed what the full cache would have written."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.divergence import position_weights
from bpkv_trt.evaluation.metrics import Gap, gap_between
from bpkv_trt.evaluation.reference import Reference, correct_references
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.step import Chunk

TIMED_STEPS = 3  # of the continuation, decoded one at a time


@dataclass(frozen=True)
class Trial:
    """What was measured."""

    gap: Gap | None  # None where the full cache says nothing after the last compaction came due
    correct: tuple[bool, ...]  # by measured reference answer
    events: tuple[CompactionEvent, ...]
    one_step_kl: float | None  # at the scoring positions of the prompt's compaction: what it was estimated to be
    retention: NDArray[np.float64]  # [L, Hkv] rows kept by the last compaction / rows seen by then; 1 without one
    decode_s: float | None  # median of one token


def run_trial(loaded: LoadedModel, config: BpkvConfig, reference: Reference) -> Trial:
    """Fork the reference's prompt, compact and continue it by `config`; the pool is left as it was found."""
    engine = Engine(loaded, config, reference.engine.pool, memory=reference.memory)
    opened = [sequence := engine.adopt(reference.engine, reference.sequence)]
    try:
        events = _compact_prompt(engine, sequence)
        one_step = _one_step_kl(engine, sequence, reference, events, [])
        logits, later = _read_turns(engine, sequence, reference)
        events += later
        before = reference.sample.lead[: engine.compactor.tokens_until_due(sequence)]
        logits, later = _read_lead(engine, sequence, before, logits)
        if later and one_step is None:
            one_step = _one_step_kl(engine, sequence, reference, later, before)
        events += later
        logits, later = _read_lead(engine, sequence, reference.sample.lead[len(before) :], logits)
        events += later
        opened.append(other := engine.fork(sequence))
        answer = torch.cat([logits, engine.follow(other, reference.sample.answer)[0]])
        correct = correct_references(answer, reference.sample)
        following, seconds, later = _continue(engine, sequence, reference.continuation[:-1])
        events += later
        predictions = torch.cat([logits, following])[reference.first : len(reference.continuation)]
        return Trial(
            gap=gap_between(reference.log_probs, predictions) if len(predictions) else None,
            correct=tuple(right for right, late in zip(correct, reference.measured, strict=True) if late),
            events=tuple(events),
            one_step_kl=one_step,
            retention=_retention(engine, sequence, reference, events),
            decode_s=seconds,
        )
    finally:
        for each in opened:
            engine.close(each)


def _compact_prompt(engine: Engine, sequence: int) -> list[CompactionEvent]:
    event = engine.compactor.on_context_step_end(sequence)
    return [] if event is None else [event]


def _read_turns(engine: Engine, sequence: int, reference: Reference) -> tuple[Tensor, list[CompactionEvent]]:
    """Encode the later turns: the logits [1, V] that come next, and what was compacted."""
    events, logits = list[CompactionEvent](), reference.logits
    for turn in reference.sample.turns[1:]:
        logits = engine.encode([(sequence, turn)])
        events += _compact_prompt(engine, sequence)
    return logits, events


def _read_lead(
    engine: Engine, sequence: int, tokens: Sequence[int], logits: Tensor
) -> tuple[Tensor, list[CompactionEvent]]:
    """Feed a part of the lead, behind which `logits` [1, V] stand: those that come next, and what was compacted."""
    following, events = engine.follow(sequence, tokens)
    return following[-1:] if len(tokens) else logits, events


def _continue(
    engine: Engine, sequence: int, tokens: Sequence[int]
) -> tuple[Tensor, float | None, list[CompactionEvent]]:
    """Feed tokens, the last few one at a time: logits [n, V], median seconds of a step, and what was compacted."""
    split = max(len(tokens) - TIMED_STEPS, 0)
    logits, events = engine.follow(sequence, tokens[:split])
    rows, seconds = [logits], list[float]()
    for token in tokens[split:]:
        start = time.perf_counter()
        logits, later = engine.follow(sequence, [token])
        seconds.append(time.perf_counter() - start)
        rows.append(logits)
        events += later
    return torch.cat(rows), statistics.median(seconds) if seconds else None, events


def _retention(
    engine: Engine, sequence: int, reference: Reference, events: Sequence[CompactionEvent]
) -> NDArray[np.float64]:
    lengths, pool = engine.pool.lengths(sequence), engine.pool
    happened = [event for event in events if event.entries_after < event.entries_before]
    if not happened:
        return np.ones(lengths.shape)
    turns = [len(turn) for turn in reference.sample.turns]
    seen = turns[0] if happened[-1].regime == "prefill" else sum(turns) + happened[-1].step
    shares = 1 - (pool.logical_length(sequence) - lengths) / seen
    shares[list(engine.host.traits.sliding_layers)] = 1  # what leaves their window was not evicted
    return shares


def _one_step_kl(
    engine: Engine, sequence: int, reference: Reference, events: Sequence[CompactionEvent], before: Sequence[int]
) -> float | None:
    """The true KL of an estimated compaction that has just happened, `before` being the tokens decoded until then.

    Its scoring positions are run again over the full and the compacted cache, and weigh as in the estimate. None where
    nothing was estimated, or an answer was compacted, whose full cache is not at hand.
    """
    if not events or events[-1].estimated_kl is None or events[-1].regime == "generation":
        return None
    base, config, event = reference.engine.host, engine.compactor.config, events[-1]
    wanted = config.positions + (config.defer if event.regime == "deferred" else 0)
    full, ours = base.fork(reference.sequence), engine.host.fork(sequence)
    try:
        if before:
            base.forward([Chunk(full, before)])
        guess = engine.statistics.guesses[sequence]
        count = min(wanted, base.pool.logical_length(full)) + event.drafted
        if guess.tokens:
            base.forward([Chunk(full, guess.tokens)])
            engine.host.forward([Chunk(ours, guess.tokens)])
        truth, logits = base.replay(full, count).logits, engine.host.replay(ours, count).logits
    finally:
        base.release(full)
        engine.host.release(ours)
    kl = gap_between(torch.log_softmax(truth, dim=-1), logits).kl
    return float(torch.tensor(kl, dtype=torch.float64) @ position_weights(count, guess.weights).double())
