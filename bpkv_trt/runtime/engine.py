"""One model, one pool and one configuration put together: sequences that are compacted as they grow."""

from collections.abc import Sequence

from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.layer_table import LayerTable
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.policies.registry import make_policy, settled
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.pool.storage import pages_of
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.compactor import CompactionEvent, Compactor
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost
from bpkv_trt.runtime.torch_statistics import TorchStatistics

Turn = tuple[int, Sequence[int]]  # a sequence and its next tokens


class Engine:
    """The torch host with its compactor; every sequence is opened, fed and closed here."""

    def __init__(self, loaded: LoadedModel, config: BpkvConfig, pool: PagedKvPool, trace: Trace | None = None) -> None:
        """Raises ConfigError where policy, configuration and model do not go together."""
        traits, config = loaded.traits, settled(config)
        policy = make_policy(config, traits)
        weights = None if config.layer_table is None else LayerTable.load(config.layer_table).weights_for(traits.layers)
        self.trace = trace or Trace()
        self.host = TorchHost(loaded, pool, replayed=config.scoring_positions)
        self.statistics = TorchStatistics(self.host, config, policy.requires)
        self.compactor = Compactor(config, policy, traits, pool, self.statistics, weights, self.trace)

    @property
    def pool(self) -> PagedKvPool:
        return self.host.pool

    def open(self, expected_rows: int = 0) -> int:
        """Admit an empty sequence, which may grow to `expected_rows` (a hint for placement; nothing is reserved)."""
        sequence = self.host.admit(expected_rows)
        self.statistics.open(sequence)
        self.compactor.on_request_init(sequence)
        return sequence

    def close(self, sequence: int) -> list[CompactionEvent]:
        """Give the sequence's pages back; reports compactions that never came due."""
        events = self.compactor.on_request_finish(sequence)
        self.statistics.close(sequence)
        self.host.release(sequence)
        return events

    def encode(self, turns: Sequence[Turn]) -> Tensor:
        """Run prompts, or further turns of them, through the model; returns next-token logits [B, V]."""
        with self.trace.range("prefill", payload=sum(len(tokens) for _, tokens in turns)):
            return self.host.forward([self.chunk(*turn) for turn in turns])

    def decode(self, turns: Sequence[Turn]) -> Tensor:
        """Run one generated token of every sequence; returns next-token logits [B, V]."""
        with self.trace.range("decode", payload=len(turns)):
            return self.host.forward([self.chunk(*turn) for turn in turns])

    def chunk(self, sequence: int, tokens: Sequence[int]) -> Chunk:
        """The next tokens of a sequence, with whatever must see them pass."""
        return Chunk(sequence, tokens, self.statistics.observers(sequence))


def make_pool(loaded: LoadedModel, rows: int, page_size: int, *, caches: int = 1, poison: bool = False) -> PagedKvPool:
    """A pool for `caches` sequences of `rows` rows in every layer and head, in the model's dtype and on its device."""
    traits, parameter = loaded.traits, next(loaded.model.parameters())
    return PagedKvPool(
        layers=traits.layers,
        kv_heads=traits.kv_heads,
        head_dim=traits.head_dim,
        pages=caches * pages_of(rows, page_size) * traits.layers * traits.kv_heads,
        page_size=page_size,
        dtype=parameter.dtype,
        device=parameter.device,
        poison=poison,
    )
