"""Requests from admission to their last token: packed batches on one host, compacted as they go."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from bpkv_trt.errors import InputError, PoolExhausted
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.sampling import Sampler, SamplingParams

FinishReason = Literal["length", "stop", "aborted"]


@dataclass(eq=False)
class Request:
    """One prompt, possibly with further turns that are asked of the compacted cache, and its answer so far."""

    turns: Sequence[Sequence[int]]
    sampling: SamplingParams
    sampler: Sampler
    sequence: int | None = None
    generated: list[int] = field(default_factory=list)
    events: list[CompactionEvent] = field(default_factory=list)
    finished: FinishReason | None = None

    @property
    def handle(self) -> int:
        """The sequence of a running request."""
        assert self.sequence is not None
        return self.sequence

    def note(self, event: CompactionEvent | None) -> None:
        """Keep what a compactor's hook reported."""
        if event is not None:
            self.events.append(event)

    def take(self, logits: Tensor) -> None:
        """Draw the next token from logits [V]; `finished` says where it was the last, or a stop token."""
        token = self.sampler.next(logits)
        if token in self.sampling.stop_tokens:
            self.finished = "stop"
            return
        self.generated.append(token)
        if len(self.generated) == self.sampling.max_new_tokens:
            self.finished = "length"

    @property
    def rows_to_come(self) -> int:
        """Rows per head that the request may still add, if nothing is ever evicted."""
        remaining = self.sampling.max_new_tokens - len(self.generated)
        return remaining if self.sequence is not None else sum(map(len, self.turns)) + remaining


class Generator:
    """A small continuous-batching loop: waiting requests are admitted when the pool can hold them to their end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, turns: Sequence[Sequence[int]], sampling: SamplingParams) -> Request:
        """Queue a request.

        Raises InputError for an empty turn, ConfigError for a budget that cannot be honoured, PoolExhausted for a
        request that can never fit.
        """
        if not turns or not all(turns):
            raise InputError("The prompt has no tokens, so there is nothing to continue; give some text.")
        self.engine.compactor.check_budget([len(turn) for turn in turns])
        request = Request(turns, sampling, Sampler(sampling))
        pool = self.engine.pool
        needed, pages = pool.pages_for(request.rows_to_come) + self._scratch(request), pool.pages
        if needed > pages:
            raise PoolExhausted(
                f"The prompt and its answer need {needed} pages, and the pool has {pages} in all; "
                "give a larger pool, a shorter prompt or fewer new tokens."
            )
        self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Encode the prompts of newly admitted requests, else decode one token of every running one.

        Returns the requests that drew a token, be it a stop token. If the batch fails, all of it is aborted and the
        error raised.
        Raises PoolExhausted where nothing runs and yet the pool has no room, because others hold its pages.
        """
        admitted = self._admit()
        batch = admitted or list(self.running)
        try:
            if admitted:
                self._encode(batch)
            elif batch:
                self._decode(batch)
        except BaseException:
            for request in batch:
                self.abort(request)
            raise
        return batch

    def abort(self, request: Request) -> None:
        """End a request at once, whatever its stage; its pages are free when this returns."""
        if request.finished is not None:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        request.finished = "aborted"
        self._close(request)

    def generate(
        self, requests: Sequence[Request], on_token: Callable[[Request], None] | None = None
    ) -> Sequence[Request]:
        """Run until all `requests` are finished; whatever goes wrong, none of them keeps a page."""
        try:
            while any(request.finished is None for request in requests):
                for request in self.step():
                    if on_token is not None:
                        on_token(request)
        finally:
            for request in requests:
                self.abort(request)
        return requests

    def _admit(self) -> list[Request]:
        """Open the waiting requests that the pool can hold to their end, beside all that run to theirs."""
        pool, admitted = self.engine.pool, list[Request]()
        promised = sum(pool.pages_to_grow(request.handle, request.rows_to_come) for request in self.running)
        scratch = max((self._scratch(request) for request in self.running), default=0)  # taken by one at a time
        while self.waiting:
            promised += pool.pages_for(self.waiting[0].rows_to_come)
            scratch = max(scratch, self._scratch(self.waiting[0]))
            if promised + scratch > pool.free_pages:
                break
            admitted.append(self.waiting.popleft())
        if self.waiting and not admitted and not self.running:
            raise PoolExhausted(
                f"The next request needs {promised + scratch} pages, and {pool.free_pages} of {pool.pages} are free: "
                "the others are held outside this generator. Close those sequences, or give a larger pool."
            )
        for request in admitted:
            request.sequence = self.engine.open(request.rows_to_come)
        self.running += admitted
        return admitted

    def _scratch(self, request: Request) -> int:
        return self.engine.scratch_pages([len(turn) for turn in request.turns])

    def _encode(self, admitted: list[Request]) -> None:
        for turn in range(max(len(request.turns) for request in admitted)):
            batch = [request for request in admitted if turn < len(request.turns)]
            logits = self.engine.encode([(request.handle, request.turns[turn]) for request in batch])
            for request, row in zip(batch, logits, strict=True):
                request.note(self.engine.compactor.on_context_step_end(request.handle))
                if turn == len(request.turns) - 1:
                    self._take_token(request, row)

    def _decode(self, batch: list[Request]) -> None:
        logits = self.engine.decode([(request.handle, request.generated[-1:]) for request in batch])
        for request, row in zip(batch, logits, strict=True):
            request.note(self.engine.compactor.on_generation_step_end(request.handle))
            self._take_token(request, row)

    def _take_token(self, request: Request, logits: Tensor) -> None:
        request.take(logits)
        if request.finished is not None:
            self._close(request)

    def _close(self, request: Request) -> None:
        if request.sequence is not None:
            request.events += self.engine.close(request.sequence)
            self.running.remove(request)
            request.sequence = None
