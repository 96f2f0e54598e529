"""The next-token distribution at the scoring rows: `core.topk` as layers of a network."""

from typing import NamedTuple

import numpy as np

from bpkv_trt.errors import ConfigError
from bpkv_trt.trtllm.graph import Graph, Value
from bpkv_trt.trtllm.ranks import Ranks

MOST = 3840  # what TensorRT's TopK layer selects at most
LOWEST = float(np.finfo(np.float32).min)


class TopK(NamedTuple):
    """The K likeliest tokens of every scoring row, descending."""

    ids: Value  # [S, K] int32
    p: Value  # [S, K] fp32, renormalised over the K
    covered_mass: Value  # [S] fp32, what the K hold of the full distribution


class _Candidates(NamedTuple):
    logits: Value  # [S, n] fp32
    ids: Value  # [S, n] int32, or fp32 on the way between ranks
    mass: Value  # [S, 1] fp32, logsumexp of all logits that they were chosen from


def topk_distribution(graph: Graph, logits: Value, k: int, vocabulary: int, ranks: Ranks) -> TopK:
    """The K likeliest of the first `vocabulary` ids; logits [S, V of this rank] fp32.

    Rank r holds the rows r V to (r + 1) V of the head; those beyond the vocabulary are padding. K is clamped to the
    vocabulary. Ranks exchange their own K likeliest, [S, 2 K + 1] fp32 in one all-gather, and choose from all.

    A network cannot raise the error that `core.topk` does: a NaN or +inf among the logits makes the covered mass NaN,
    and says nothing about ids and p. Raises ConfigError for a K that TensorRT cannot select.
    """
    k = min(k, vocabulary)
    if k > MOST:
        raise ConfigError(
            f"An engine cannot follow the {k} likeliest tokens: TensorRT's TopK selects at most {MOST}. Set top_k to "
            f"{MOST} or less."
        )
    own = _own(graph, logits, k, vocabulary, ranks)
    best = own if ranks.count == 1 else _merged(graph, own, k, ranks)
    share = (best.logits.logsumexp() - best.mass).exp()
    share = share.like(1.0).where(share > 1.0, share)  # a minimum might lose NaN
    return TopK(best.ids, best.logits.softmax(), share.reshape(-1))


def _own(graph: Graph, logits: Value, k: int, vocabulary: int, ranks: Ranks) -> _Candidates:
    rows = logits.shape[-1]
    first = ranks.rank * rows
    real = np.arange(first, first + rows) < vocabulary
    if not real.all():
        logits = logits.where(graph.constant(real[None]), LOWEST)
    top, ids = logits.topk(min(k, rows))
    return _Candidates(top, ids + first if first else ids, logits.logsumexp())


def _merged(graph: Graph, own: _Candidates, k: int, ranks: Ranks) -> _Candidates:
    """The same on every rank: all choose from all."""
    assert ranks.all_gather is not None
    assert ranks.count * own.logits.shape[-1] >= k, "what all ranks hold is at least the vocabulary"
    fp32, int32 = graph.trt.float32, graph.trt.int32
    message = graph.concatenate([own.logits, own.ids.cast(fp32), own.mass], axis=1)
    received = graph.value(ranks.all_gather(message.tensor))
    n = own.logits.shape[-1]
    columns = np.arange(ranks.count * (2 * n + 1), dtype=np.int32).reshape(ranks.count, 2 * n + 1)
    logits, ids, mass = (
        received.gather(graph.constant(part.flatten()), axis=1)
        for part in (columns[:, :n], columns[:, n : 2 * n], columns[:, 2 * n :])
    )
    top, chosen = logits.topk(k)
    return _Candidates(top, ids.gather_elements(chosen).cast(int32), mass.logsumexp())
