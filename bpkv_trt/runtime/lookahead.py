"""A look ahead: the model drafts how it would go on, so that an eviction can be judged where its entries are needed."""

from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost


def draft(host: TorchHost, sequence: int, count: int, stop_tokens: frozenset[int]) -> int:
    """Append the model's own greedy continuation, up to `count` tokens or a stop token; returns how many came.

    Nothing that observes the sequence sees them. Raises PoolExhausted where the pool has no room for `count` rows,
    with the sequence as it was.
    """
    host.pool.require_growth(sequence, count)
    logits = host.replay(sequence, 1).logits
    for drafted in range(count):
        token = int(logits[0].argmax())
        if token in stop_tokens:
            return drafted
        logits = host.forward([Chunk(sequence, [token])], drafting=True)
    return count
