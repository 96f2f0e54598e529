"""TensorRT-LLM's generation session, 1.0 to 1.2, with a paged KV cache that is compacted between its steps.

Importing this module imports TensorRT-LLM. What is decided is decided by `SessionBatch`; here it meets the session's
own bookkeeping. The one place where that is complete is `_get_next_step_shape_buffer`: the engine has run and written
its rows, the managers have counted the next token's, and nothing is bound yet for the next run.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from tensorrt_llm.runtime.generation import GenerationSession, RuntimeTensor
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, PoolExhausted
from bpkv_trt.kernels.launch import launched_by
from bpkv_trt.pool.block_pool import BlockPool
from bpkv_trt.pool.storage import pages_of
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine_ports import EnginePorts
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.most_rows import most_rows
from bpkv_trt.runtime.session_batch import SessionBatch
from bpkv_trt.runtime.session_conflicts import refuse_decode, refuse_model, refuse_setup
from bpkv_trt.trtllm.built_engine import BuiltEngine


class BpkvSession(GenerationSession):  # type: ignore[misc]
    """Positions stay logical (`position_ids`, and the sampler's `sequence_length_buffer`); what attention is told of,
    `sequence_length` and the blocks, are the rows that are held.

    `events`: of the last `decode`, by sequence, what was compacted: so far, while it runs. `config`: what the next
    batch is compacted with, to be changed before its `setup`.
    """

    def __init__(
        self,
        model_config: Any,
        engine_buffer: Any,
        mapping: Any,
        built: BuiltEngine,
        config: BpkvConfig | None = None,
        *,
        cuda_graph_mode: bool = False,
        stream: Any = None,
        trace: Trace | None = None,
        bounded: bool = False,
        poison: bool = False,
    ) -> None:
        """The first three as GenerationSession takes them; the plugin is registered (`PluginLibrary.register`).

        config: by default the engine's own; `EngineSettings.configured` gives others. bounded: the cache has blocks for
        the most rows that compactions leave, and not for every token; where one does not take place, a step may then
        raise PoolExhausted. poison: unused rows are NaN. Raises ConfigError for what cannot be compacted.
        """
        refuse_model(model_config, mapping, cuda_graph_mode)
        # Names that the stock session does not expect are an error to it unless it debugs.
        super().__init__(model_config, engine_buffer, mapping, debug_mode=True, stream=stream)
        self.debug_mode = False
        self.built = built
        self.config = built.settings.config if config is None else config
        self.trace = trace or Trace()
        self.events: list[list[CompactionEvent]] = []
        self._bounded, self._poison = bounded, poison
        self._ports = EnginePorts(self.runtime.engine, built.traits.layers, self.device)
        self._batch: SessionBatch | None = None
        self._running = ExitStack()

    def most_rows(self, config: BpkvConfig, prompt: int, answer: int) -> int:
        """Rows that a prompt of so many tokens and its answer come to hold. ConfigError for a budget that cannot be
        honoured for it."""
        itemsize = (self.built.cache_dtype or self.dtype).itemsize
        return most_rows(config, self.built.traits, itemsize, prompt, answer)

    @property
    def most_scored(self) -> int:
        """Positions that one run of the engine may score, over all its sequences."""
        return self._ports.most_rows

    @property
    def running_pool(self) -> BlockPool | None:
        """Of the batch that runs."""
        return None if self._batch is None else self._batch.pool

    def ended(self, sequence: int) -> list[CompactionEvent]:
        """What `events` would be told of a sequence of the batch that runs if its answer ended now."""
        assert self._batch is not None, "no batch runs"
        return self._batch.ended(sequence)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """As the stock session's. Raises ConfigError, before anything is allocated, for what cannot be compacted or is
        more than the engine was built for."""
        given = _named(GenerationSession.setup, self, *args, **kwargs)
        refuse_setup(given, self.built.limits, self.most_scored, self.config)
        super().setup(*args, **kwargs)

    def _get_num_paged_blocks(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Blocks of the cache, and of one sequence."""
        blocks, longest = super()._get_num_paged_blocks(*args, **kwargs)
        if self._bounded:
            prompt = self.max_seq_length - self.max_new_tokens
            rows = self.most_rows(self.config, prompt, self.max_new_tokens)
            longest = min(longest, pages_of(rows + 1, self.tokens_per_block))  # with the next token's
            blocks = min(blocks, self.batch_size * longest)
        return blocks, longest

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock session's; afterwards, or after the last of a stream, `events` tells what was compacted."""
        refuse_decode(_named(GenerationSession.decode, self, *args, **kwargs), self.built.limits)
        self._batch, self.events = None, []
        try:
            outputs = super().decode(*args, **kwargs)
        except BaseException:
            self._batch = None
            raise
        if inspect.isgenerator(outputs):
            return self._streamed(outputs)
        self._finish()
        return outputs

    def _streamed(self, outputs: Iterator[Any]) -> Iterator[Any]:
        own = None
        try:
            while True:
                if own is not self._batch and own is not None:
                    raise BpkvError("This stream's batch has ended, since its session began another: finish it before.")
                try:
                    output = next(outputs)
                except StopIteration:
                    return
                finally:
                    own = self._batch  # the first step makes it, be it that it fails
                yield output
        finally:  # also where the reader stops early
            if own is self._batch:
                self._finish()

    def handle_per_step(self, **given: Any) -> Any:
        """The stock step; afterwards the lengths that the next run is bound to are those of its own rows."""
        step, batch = given["step"], given["batch_size"]
        tokens = int(given["host_context_lengths"].sum()) if step == 0 else batch
        with self._running:
            self._running.enter_context(self.trace.range("decode" if step else "prefill", payload=tokens))
            outputs = super().handle_per_step(**given)
        if self._batch is not None:
            self._lengths.copy_(self.sequence_length_buffer.view(-1) - self._evicted)
        return outputs

    def _get_context_shape_buffer(self, *args: Any, **kwargs: Any) -> dict[str, RuntimeTensor]:
        given = _named(GenerationSession._get_context_shape_buffer, self, *args, **kwargs)
        prompts = given["host_context_lengths"].tolist()
        with self._launching():
            pool = self._pool()
        self._batch = SessionBatch(self.config, self.built.traits, pool, self.built.projections, self.trace)
        self.events = self._batch.events
        self._evicted = torch.zeros(len(prompts), dtype=torch.int32, device=self.device)
        self._lengths = torch.zeros_like(self._evicted)
        tensors = super()._get_context_shape_buffer(*args, **kwargs)
        return self._with_ports(tensors, self._batch.prompts(prompts).tensors(self.device))

    def _get_next_step_shape_buffer(self, *args: Any, **kwargs: Any) -> dict[str, RuntimeTensor]:
        given = _named(GenerationSession._get_next_step_shape_buffer, self, *args, **kwargs)
        self._running.close()  # what follows is compaction's time
        batch = self._batch
        assert batch is not None, "a step of no batch"
        rows = given["host_context_lengths"].tolist() if given["step"] == 0 else self._lengths.tolist()
        going_on = [not ended for ended in self.finished.view(-1).tolist()]
        with self._launching():
            batch.after_run(rows, going_on, self._ports.bound)
        if not batch.pool.holds_another_step():
            notes = dict.fromkeys(event.note for own in batch.events for event in own if event.note)
            raise PoolExhausted(
                f"The cache has blocks for what compactions leave (bounded), and one did not take place "
                f"({'; '.join(notes)}). Run the batch with a session that is not bounded."
            )

        offsets = batch.pool.block_offsets()
        given |= {"host_kv_cache_block_offsets": offsets, "kv_cache_block_offsets": offsets.to(self.device)}
        tensors = super()._get_next_step_shape_buffer(**given)
        self._evicted.copy_(torch.tensor(batch.evicted))
        tensors["sequence_length"] = RuntimeTensor.from_torch("sequence_length", self._lengths)
        held = torch.tensor(batch.rows, dtype=torch.int32)
        tensors["host_past_key_value_lengths"] = RuntimeTensor.from_torch("host_past_key_value_lengths", held)
        return self._with_ports(tensors, batch.next_tokens().tensors(self.device))

    def _with_ports(self, tensors: dict[str, RuntimeTensor], scored: dict[str, Tensor]) -> dict[str, RuntimeTensor]:
        """With the engine's further inputs and outputs; the stock session binds what is in the dictionary."""
        assert self._batch is not None
        pool = self._batch.pool
        inputs = {**scored, "bpkv_pool_pointers": self._pool_pointers}
        return tensors | self._ports.bind(inputs, len(pool.sequences), pool.most_rows)

    def _launching(self) -> AbstractContextManager[None]:
        """Kernels run inside are those that were compiled with the engine."""
        return nullcontext() if self.built.kernels is None else launched_by(self.built.kernels)

    def _pool(self) -> BlockPool:
        """The session's memory and its managers, which are new in every `decode`."""
        memories = self._memory_pool_allocator._pool_pointers
        if len(memories) != 1:
            raise BpkvError(
                f"The session has {len(memories)} KV pools, and an engine with BP-KV scores one: its layers have "
                "different numbers of KV heads, which is not covered."
            )
        first = memories[0].data_ptr()
        self._pool_pointers = torch.tensor([[first, first]], dtype=torch.int64, device=self.device)
        return BlockPool(
            memories,
            self.buffer["host_kv_cache_pool_mapping"],
            self.pools_kv_cache_manager._kv_cache_managers,
            dtype=self.built.cache_dtype,
            scales=self.built.cache_scales,
            poison=self._poison,
        )

    def _finish(self) -> None:
        if self._batch is not None:
            self.events, self._batch = self._batch.finish(), None


def _named(stock: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a stock method by name, without `self`."""
    bound = inspect.signature(stock).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
