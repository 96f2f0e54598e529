"""The requests that run together: admitted by pages, prompts chunk by chunk beside one token of every answer."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import InputError, PoolExhausted
from bpkv_trt.models.loading import HostedModel
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine import Engine, make_pool_within
from bpkv_trt.runtime.engines import Engines
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import FinishReason, Request
from bpkv_trt.runtime.memory import free_bytes, require_scoring_memory
from bpkv_trt.runtime.page_need import PageNeed
from bpkv_trt.runtime.sampling import Sampler, SamplingParams
from bpkv_trt.runtime.serving_request import ServingRequest
from bpkv_trt.runtime.torch_host import TorchHost, finite


@dataclass(eq=False)
class BatchedRequest:
    """A request with the engine of its configuration, and how far its prompt has been run."""

    engine: Engine
    prompt: Sequence[int]
    request: Request
    need: PageNeed
    encoded: int = 0
    given_up: list[CompactionEvent] = field(default_factory=list)  # of a run that was started over
    error: Exception | None = None

    @property
    def generated(self) -> Sequence[int]:
        """Tokens of the answer."""
        return self.request.generated

    @property
    def events(self) -> Sequence[CompactionEvent]:
        """What was compacted."""
        return [*self.given_up, *self.request.events]

    @property
    def finished(self) -> FinishReason | None:
        """None while it waits or runs."""
        return self.request.finished

    @property
    def in_prompt(self) -> bool:
        """Whether tokens of the prompt are still to be run."""
        return self.encoded < len(self.prompt)

    @property
    def promised(self) -> int:
        """Pages that a running request may still take, whatever is evicted of it later."""
        pool, sequence = self.engine.pool, self.request.handle
        if self.in_prompt:
            return self.need.pages - pool.owned_pages(sequence)
        return pool.pages_to_grow(sequence, self.request.rows_to_come)

    @property
    def scratch(self) -> int:
        """Pages that a compaction to come of the prompt borrows."""
        deferred = "deferred" in self.engine.compactor.config.regime
        compacted = any(event.regime == "deferred" for event in self.request.events)
        return self.need.scratch if self.in_prompt or (deferred and not compacted) else 0


class ServingBatch:
    """Continuous batching over one pool, which is never over-committed; one thread runs it.

    Law L5 sets the rules: an answer is what it would be alone, but for the rounding of matrix products of other sizes.
    Chunks of a prompt end where they would if it ran alone. A prompt is compacted as soon as it is complete, so that
    its pages are free before another request has to wait for pages. No sequence is compacted earlier or harder because
    others wait: its answer would depend on them.
    """

    def __init__(
        self, engines: Engines, trace: Trace, *, chunk_tokens: int, most_running: int, room: int | None = None
    ) -> None:
        """`chunk_tokens`: of prompts in one step; `most_running`: requests at once; `room`: bytes of memory beside
        weights and pool, where requests that cannot be scored in it are refused."""
        if min(chunk_tokens, most_running) < 1:
            raise InputError(
                f"chunk_tokens is {chunk_tokens} and most_running is {most_running}; both must be 1 or more."
            )
        self.engines, self.trace, self._room = engines, trace, room
        self.chunk_tokens, self.most_running = chunk_tokens, most_running
        self.waiting: deque[BatchedRequest] = deque()
        self.running: list[BatchedRequest] = []
        self.failed = False  # whether the latest forward pass failed, and so all who took part

    @classmethod
    def over(
        cls,
        loaded: HostedModel,
        config: BpkvConfig,
        trace: Trace,
        *,
        pool_bytes: int,
        chunk_tokens: int = 256,
        most_running: int = 64,
        poison: bool = False,
    ) -> "ServingBatch":
        """A batch of a model, over a pool of its own. `config`: what requests change options of. `poison`: free rows of
        the pool are NaN, for tests.

        Raises ConfigError and InputError where model, configuration and sizes do not go together.
        """
        pool = make_pool_within(loaded, pool_bytes, config.page_size, poison=poison)
        room, engines = free_bytes(loaded.model.device), Engines(loaded, config, pool, trace)
        return cls(engines, trace, chunk_tokens=chunk_tokens, most_running=most_running, room=room)

    @property
    def host(self) -> TorchHost:
        return self.engines.host

    @property
    def pool(self) -> PagedKvPool:
        return self.host.pool

    @property
    def pages_free(self) -> int:
        """Pages of the pool that nobody owns."""
        return self.pool.free_pages

    @property
    def pages_live(self) -> int:
        """Pages of the pool that sequences own."""
        return self.pool.live_pages

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt that could ever be served."""
        return self.host.traits.max_positions - 1

    def prepare(self, request: ServingRequest, prompt: Sequence[int]) -> BatchedRequest:
        """Check a request whose text is these tokens; any thread may do so.

        Raises ConfigError and InputError for options that cannot be had, InputError where memory cannot hold its
        scoring, and as `prepare_tokens`.
        """
        engine = self.engines.of(request.options)
        config = engine.compactor.config
        sampling = request.sampling(engine.statistics.stop_tokens, config.seed)
        batched = self.prepare_tokens(engine, prompt, sampling)
        if self._room is not None:
            require_scoring_memory(self.engines.loaded, len(prompt) + request.max_tokens, config, self._room)
        return batched

    def prepare_tokens(self, engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> BatchedRequest:
        """The same for an engine of its configuration.

        Raises InputError for a prompt without tokens or past the model's positions, ConfigError for a budget that
        cannot be honoured, PoolExhausted for a request that can never fit.
        """
        tokens, new = len(prompt), sampling.max_new_tokens
        if not tokens:
            raise InputError("The prompt has no tokens, so there is nothing to continue; give some text.")
        known = engine.host.traits.max_positions
        if tokens + new > known:
            raise InputError(
                f"The prompt has {tokens} tokens, with {new} new ones to come, but the model knows {known} positions. "
                "Shorten the prompt or the answer."
            )
        engine.compactor.check_budget([tokens])
        need = PageNeed.of(engine, tokens, new)
        self._require(need)
        return BatchedRequest(engine, prompt, Request([prompt], sampling, Sampler(sampling)), need)

    def add(self, batched: BatchedRequest) -> None:
        """Queue a request that was prepared."""
        self.waiting.append(batched)

    def remove(self, batched: BatchedRequest) -> None:
        """End a request, whatever its stage, once or again; its pages are free when this returns."""
        if batched in self.waiting:
            self.waiting.remove(batched)
        batched.request.finished = batched.request.finished or "aborted"
        if batched.request.sequence is not None:
            self._close(batched)

    def step(self) -> list[BatchedRequest]:
        """Admit, run one forward pass, compact what is due and draw a token for every request that is past its prompt.

        Returns the requests that took part. One that goes wrong is ended with its `error` and leaves the others; a
        forward pass that fails ends all who took part.
        """
        not_opened = self._admit()
        parts = self._parts()
        self.failed = False
        try:
            logits = self._forward(parts) if parts else ()
        except Exception as error:
            self.failed = True
            for batched, _ in parts:
                self._fail(batched, error)
        else:
            for (batched, tokens), row in zip(parts, logits, strict=True):
                self._advance(batched, len(tokens), row)
        return [*not_opened, *(batched for batched, _ in parts)]

    def _admit(self) -> list[BatchedRequest]:
        """Open waiting requests, first come, first served, while the pool can hold all that run to their ends.

        Returns those that could not be opened, ended with their errors.
        """
        not_opened = list[BatchedRequest]()
        while self.waiting and len(self.running) < self.most_running and self._fits(self.waiting[0].need):
            batched = self.waiting.popleft()
            try:
                batched.request.sequence = batched.engine.open(batched.request.rows_to_come)
            except Exception as error:
                self._fail(batched, error)
                not_opened.append(batched)
            else:
                self.running.append(batched)
        assert self.running or not self.waiting, "a request that fits alone waits, and nothing runs"
        return not_opened

    def _fits(self, further: PageNeed) -> bool:
        """Whether the pool has room for all that those who run may still take, and for one more."""
        promised = sum(batched.promised for batched in self.running) + further.pages
        scratch = max((batched.scratch for batched in self.running), default=0)  # borrowed by one at a time
        return promised + max(scratch, further.scratch) <= self.pool.free_pages

    def _parts(self) -> list[tuple[BatchedRequest, Sequence[int]]]:
        """The next tokens of those who run. The first prompt always goes on, others where their chunk fits beside."""
        parts, room = list[tuple[BatchedRequest, Sequence[int]]](), self.chunk_tokens
        for batched in self.running:
            if not batched.in_prompt:
                parts.append((batched, batched.request.generated[-1:]))
                continue
            chunk = batched.prompt[batched.encoded : batched.encoded + self.chunk_tokens]
            if len(chunk) <= room:
                parts.append((batched, chunk))
                room -= len(chunk)
        return parts

    def _forward(self, parts: Sequence[tuple[BatchedRequest, Sequence[int]]]) -> Tensor:
        """Next-token logits [B, V]."""
        tokens = sum(len(tokens) for batched, tokens in parts if batched.in_prompt)
        with self.trace.range("prefill" if tokens else "decode", payload=tokens or len(parts)):
            chunks = [batched.engine.chunk(batched.request.handle, tokens) for batched, tokens in parts]
            return self.host.forward(chunks, checked=False)

    def _advance(self, batched: BatchedRequest, tokens: int, logits: Tensor) -> None:
        try:
            self._compact(batched, tokens, finite(logits))
        except Exception as error:
            self._fail(batched, error)

    def _compact(self, batched: BatchedRequest, tokens: int, logits: Tensor) -> None:
        request, compactor = batched.request, batched.engine.compactor
        if batched.in_prompt:
            batched.encoded += tokens
            if batched.in_prompt:
                return
            request.note(compactor.on_context_step_end(request.handle))
            if not self._fits(PageNeed(0, 0)):
                return self._start_over(batched)
        else:
            request.note(compactor.on_generation_step_end(request.handle))
        request.take(logits)
        if request.finished is not None:
            self._close(batched)

    def _start_over(self, batched: BatchedRequest) -> None:
        """A prompt was not compacted, its scores being NaN or Inf, and others were admitted counting on it.

        No token was drawn yet: it waits, first of all, for room to the end of its answer with nothing evicted.
        """
        batched.given_up += batched.request.events
        self._close(batched)
        batched.request.events.clear()
        batched.encoded = 0
        batched.need = PageNeed.whole(batched.engine, len(batched.prompt), batched.request.sampling.max_new_tokens)
        self._require(batched.need)
        self.waiting.appendleft(batched)

    def _require(self, need: PageNeed) -> None:
        if need.total > self.pool.pages:
            raise PoolExhausted(
                f"The request needs {need.total} pages, {need.scratch} of them for the compaction of its prompt, and "
                f"the pool has {self.pool.pages} in all; give a shorter prompt, fewer new tokens, a smaller budget or "
                "another policy."
            )

    def _fail(self, batched: BatchedRequest, error: Exception) -> None:
        batched.error = error
        self.remove(batched)

    def _close(self, batched: BatchedRequest) -> None:
        request = batched.request
        self.running.remove(batched)
        sequence, request.sequence = request.handle, None
        request.events += batched.engine.close(sequence)
