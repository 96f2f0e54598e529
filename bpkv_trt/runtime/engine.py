"""One model, one pool and one configuration put together: sequences that are compacted as they grow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.errors import InputError
from bpkv_trt.models.loading import HostedModel, LoadedModel
from bpkv_trt.models.stop_tokens import stop_tokens_of
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.registry import make_policy, settled
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.pool.storage import pages_of
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.compactor import Compactor
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.memory import free_bytes, pool_bytes
from bpkv_trt.runtime.remembered_statistics import Memory, RememberedStatistics
from bpkv_trt.runtime.scratch import scratch_rows
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost
from bpkv_trt.runtime.torch_statistics import TorchStatistics
from bpkv_trt.score_table import ScoreTable

Turn = tuple[int, Sequence[int]]  # a sequence and its next tokens


class Engine:
    """The torch host with its compactor; every sequence is opened, fed and closed here."""

    def __init__(
        self,
        loaded: HostedModel,
        config: BpkvConfig,
        pool: PagedKvPool,
        trace: Trace | None = None,
        observed: frozenset[Requirement] = frozenset(),
        replayed: int = 0,
        rules: Sequence[RunningAttention] = (),
        memory: Memory | None = None,
        host: TorchHost | None = None,
    ) -> None:
        """`observed`, `replayed` and `rules`: what other engines, that adopt sequences of this one, need of them; the
        rules are the `running_attention` of policies that require `received_attention`. `memory`: of the one sequence
        whose copies are all that engines with this memory are given. `host`: of another engine of the same model and
        pool, so that sequences of both can be packed into one forward pass.

        Raises ConfigError where policy, configuration and model do not go together.
        """
        traits, config = loaded.traits, settled(config)
        policy = make_policy(config, traits)
        table = None if config.layer_table is None else ScoreTable.load(config.layer_table)
        if table is not None:
            table.check(traits.layers, traits.kv_heads, config.scope)
        self.trace = trace or Trace()
        self.trace.cache_bytes = lambda: pool.live_pages * pool.page_bytes
        assert host is None or host.pool is pool
        self.host = host or TorchHost(loaded, pool, replayed=0)
        self.host.keep_for_replay(max(replayed, config.replayed_positions))
        rules = (policy.running_attention, *rules)
        encoder, tokenizer = (loaded.encoder, loaded.tokenizer) if isinstance(loaded, LoadedModel) else (None, None)
        ends = stop_tokens_of(loaded.model, tokenizer)
        given = self.host, config, policy.requires | observed, rules, encoder, ends
        self.statistics = TorchStatistics(*given) if memory is None else RememberedStatistics(memory, *given)
        self.compactor = Compactor(config, policy, traits, pool, self.statistics, table, self.trace)

    @property
    def pool(self) -> PagedKvPool:
        return self.host.pool

    def open(self, expected_rows: int = 0) -> int:
        """Admit an empty sequence, which may grow to `expected_rows` (a hint for placement; nothing is reserved).

        Nothing of it is left where something raises.
        """
        sequence = self.host.admit(expected_rows)
        try:
            self.statistics.open(sequence)
            self.compactor.on_request_init(sequence)
        except BaseException:
            self.statistics.close(sequence)
            self.host.release(sequence)
            raise
        return sequence

    def adopt(self, other: "Engine", sequence: int) -> int:
        """Fork a sequence of another engine of the same model and pool, to go on with it by this configuration.

        The other engine must observe what this one's policy requires. Raises PoolExhausted with nothing changed.
        """
        copy = self.host.adopt(other.host, sequence)
        self.statistics.adopt(other.statistics, sequence, copy)
        self.compactor.on_request_init(copy)
        return copy

    def fork(self, sequence: int) -> int:
        """Copy a sequence with all that is known of it, compactions included; PoolExhausted changes nothing."""
        copy = self.host.fork(sequence)
        self.statistics.adopt(self.statistics, sequence, copy)
        self.compactor.on_request_fork(sequence, copy)
        return copy

    def follow(self, sequence: int, tokens: Sequence[int]) -> tuple[Tensor, list[CompactionEvent]]:
        """Run an answer that is known beforehand, compacting where its tokens come due.

        Returns the next-token logits after each token, [n, V], and what was compacted. The same as decoding the
        tokens one by one, but for rounding, in as few forward passes as the compactions allow.
        """
        logits, events, done = list[Tensor](), list[CompactionEvent](), 0
        while done < len(tokens):
            due = self.compactor.tokens_until_due(sequence)
            part = tokens[done:] if due is None else tokens[done : done + due]
            logits.append(self.host.forward([self.chunk(sequence, part)], every_token=True))
            reported = [self.compactor.on_generation_step_end(sequence) for _ in part]
            events += [event for event in reported if event is not None]
            done += len(part)
        nothing = torch.empty(0, self.host.model.config.vocab_size, device=self.host.device)
        return torch.cat(logits) if logits else nothing, events

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

    def scratch_pages(self, turns: Sequence[int]) -> int:
        """Pages that a compaction takes and gives back, for a prompt of turns of so many tokens."""
        return self.pool.pages_for(scratch_rows(self.compactor.config, self.statistics.encoder, turns))

    def chunk(self, sequence: int, tokens: Sequence[int]) -> Chunk:
        """The next tokens of a sequence, with whatever must see them pass."""
        return Chunk(sequence, tokens, self.statistics.observers(sequence))


def make_pool(
    loaded: HostedModel,
    rows: int,
    page_size: int,
    *,
    caches: int = 1,
    scratch: int = 0,
    poison: bool = False,
    kernels: bool | None = None,
) -> PagedKvPool:
    """A pool for `caches` sequences of `rows` rows in every layer and head, in the model's dtype and on its device.

    `scratch`: further rows, as `scratch_rows` counts them for what a compaction takes and gives back. `kernels`: as
    `PagedKvPool` takes it.
    """
    traits = loaded.traits
    pages = (caches * pages_of(rows, page_size) + pages_of(scratch, page_size)) * traits.layers * traits.kv_heads
    return _pool(loaded, pages, page_size, poison, kernels)


def make_pool_within(loaded: HostedModel, size: int, page_size: int, *, poison: bool = False) -> PagedKvPool:
    """A pool of at most `size` bytes, keys, values and positions counted.

    Raises InputError where that is less than a page, or more than the device has free.
    """
    device = loaded.model.device
    if size > (free := free_bytes(device)):
        raise InputError(
            f"The pool is given {size / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free on {device} beside the "
            "model; give it less."
        )
    pages = size // (pool_bytes(loaded, page_size, page_size) // (loaded.traits.layers * loaded.traits.kv_heads))
    if pages < 1:
        raise InputError(
            f"The pool is given {size} bytes, less than one page of {page_size} rows; give it more, or a smaller "
            "page_size."
        )
    return _pool(loaded, pages, page_size, poison, None)


def _pool(loaded: HostedModel, pages: int, page_size: int, poison: bool, kernels: bool | None) -> PagedKvPool:
    traits, parameter = loaded.traits, next(loaded.model.parameters())
    return PagedKvPool(
        layers=traits.layers,
        kv_heads=traits.kv_heads,
        head_dim=traits.head_dim,
        pages=pages,
        page_size=page_size,
        dtype=parameter.dtype,
        device=parameter.device,
        poison=poison,
        kernels=kernels,
    )
