"""What compaction did to the model's predictions, by teacher forcing: the full cache beside the compacted one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from bpkv_trt.evaluation.metrics import Gap, gap_between
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.step import Chunk


@dataclass(frozen=True)
class Verification:
    """Future KL and agreement over the full cache's own greedy continuation (nats, whole vocabulary)."""

    future_kl_mean: float | None  # None where no token could be compared
    future_kl_max: float | None
    top1_agreement: float | None
    tokens: int


def verify(
    engine: Engine,
    turns: Sequence[Sequence[int]],
    stop_tokens: frozenset[int],
    max_new_tokens: int,
    on_step: Callable[[], None] = lambda: None,
) -> Verification:
    """Feed the full cache's greedy continuation to both caches and compare their next-token distributions.

    Both start from one prefill, forked before the compaction. Compared are the predictions made after the first
    compaction came due: what comes from the prefill itself, or before a deferred one, is the same by construction.
    """
    with engine.trace.range("verify", payload=max_new_tokens):
        compacted, full = engine.open(sum(map(len, turns)) + max_new_tokens), None
        try:
            logits = engine.host.forward([engine.chunk(compacted, turns[0])])
            full = engine.host.fork(compacted)
            return _compare(engine, full, compacted, logits, turns[1:], stop_tokens, max_new_tokens, on_step)
        finally:
            engine.close(compacted)
            if full is not None:
                engine.host.release(full)


def _compare(
    engine: Engine,
    full: int,
    compacted: int,
    logits: Tensor,
    turns: Sequence[Sequence[int]],
    stop_tokens: frozenset[int],
    max_new_tokens: int,
    on_step: Callable[[], None],
) -> Verification:
    def feed(tokens: Sequence[int]) -> Tensor:
        return engine.host.forward([Chunk(full, tokens), engine.chunk(compacted, tokens)])  # [2, V]

    compactor, gaps = engine.compactor, list[Gap]()  # of one token each
    due = compactor.on_context_step_end(compacted) is not None
    begun = False  # whether the prediction that begins the answer was made from a compacted cache
    for turn in turns:
        begun, logits = due, feed(turn)
        due |= compactor.on_context_step_end(compacted) is not None
    if begun:
        gaps.append(gap_between(logits[:1], logits[1:]))
    token = int(logits[0].argmax())
    for _ in range(1, max_new_tokens):
        if token in stop_tokens:
            break
        logits = feed([token])
        if due:
            gaps.append(gap_between(logits[:1], logits[1:]))
        due |= compactor.on_generation_step_end(compacted) is not None
        token = int(logits[0].argmax())
        on_step()
    if not gaps:
        return Verification(None, None, None, 0)
    kl, agreed = [gap.kl[0] for gap in gaps], [gap.top1[0] for gap in gaps]
    return Verification(sum(kl) / len(kl), max(kl), sum(agreed) / len(agreed), len(gaps))
