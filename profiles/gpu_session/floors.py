"""The least work of every kernel, and the least time that a machine of given ceilings takes for it."""

from dataclasses import dataclass

ITEM = 2  # bytes of a cached number, in bf16
TF32 = 2  # a product in tf32 takes as long as two in bf16
PRODUCTS = 3  # of tf32 for one that keeps the digits of fp32


@dataclass(frozen=True)
class Shape:
    """What kernels see of a model."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    parameters: float


@dataclass(frozen=True)
class Work:
    """FLOPs as products in bf16, and bytes of device memory."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Ceilings:
    """What the machine was measured to do: FLOPs in bf16, and bytes read and written, each in a second."""

    flops: float
    bytes: float

    def floor_ms(self, work: Work) -> float:
        """Milliseconds that no implementation goes below."""
        return 1e3 * max(work.flops / self.flops, work.bytes / self.bytes)

    def binds(self, work: Work) -> str:
        """Which of the two the floor comes from."""
        return "products" if work.flops / self.flops > work.bytes / self.bytes else "bytes"


def _logits(shape: Shape, tokens: float, positions: int) -> float:
    return 2.0 * shape.query_heads * tokens * shape.head_dim * positions


def _rows(shape: Shape, tokens: float) -> float:
    # bytes of the keys, or the values, of one layer
    return float(shape.kv_heads * tokens * shape.head_dim * ITEM)


def lse(shape: Shape, tokens: int, positions: int) -> Work:
    """One product of every query with every key, which is read once."""
    return Work(_logits(shape, tokens, positions), _rows(shape, tokens))


def score(shape: Shape, tokens: int, positions: int, channels: int) -> Work:
    """Logits, and one product with every value for each channel of the readout."""
    return Work(_logits(shape, tokens, positions) * (1 + channels), 2 * _rows(shape, tokens))


def deletion(shape: Shape, tokens: int, positions: int) -> Work:
    """Logits and sums of values, for the evicted and the kept rows apart; the sums keep the digits of fp32."""
    logits = _logits(shape, tokens, positions)
    return Work(2 * logits * (1 + TF32 * PRODUCTS), 2 * _rows(shape, tokens))


def nomination(shape: Shape, tokens: int, positions: int) -> Work:
    """Logits, and a product of every value with a slope, which keeps the digits of fp32."""
    return Work(_logits(shape, tokens, positions) * (1 + TF32 * PRODUCTS), 2 * _rows(shape, tokens))


def decode(shape: Shape, rows: float, batch: int) -> Work:
    """One query per head over `rows` rows of every KV head, in each of `batch` sequences."""
    return Work(2 * batch * _logits(shape, rows, 1), 2 * batch * _rows(shape, rows))


def compact(shape: Shape, moved: int) -> Work:
    """Keys, values and positions (4 bytes) of `moved` rows, each read and written."""
    return Work(0.0, moved * 2.0 * (2 * shape.head_dim * ITEM + 4))


def choose(candidates: int, evictions: int, positions: int, channels: int, heads: int, group: int) -> Work:
    """For each eviction the shifts of all candidates, and the entries of the head that changed; see `choose`."""
    touched = (1 + channels) * candidates * group * positions / heads
    return Work(0.0, evictions * (4.0 * candidates * positions * channels + 26 * candidates + 4 * touched))


def rank(entries: int) -> Work:
    """A score and a flag of every entry read, a flag written."""
    return Work(0.0, 6.0 * entries)


def prefill(shape: Shape, tokens: int) -> Work:
    """The whole model over a prompt: every weight, and causal attention, which is half of a square."""
    attention = 2.0 * shape.layers * shape.query_heads * shape.head_dim * tokens**2
    return Work(2 * shape.parameters * tokens + attention, ITEM * shape.parameters)
