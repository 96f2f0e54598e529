"""A server's loop: requests from any thread, run together in a thread of its own, answered as their tokens come."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, InputError, QueueFull
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.answer_text import AnswerText
from bpkv_trt.runtime.engine import Engine, make_pool_within
from bpkv_trt.runtime.engines import Engines
from bpkv_trt.runtime.memory import free_bytes, scoring_bytes
from bpkv_trt.runtime.serving_batch import BatchedRequest, ServingBatch
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import Outcome, ServingOutput, ServingRequest

log = logging.getLogger(__name__)

Receive = Callable[[ServingOutput], None]


@dataclass(eq=False)
class _Client:
    """Who asked, what became of it so far, and by when it must have ended."""

    batched: BatchedRequest
    text: AnswerText
    receive: Receive
    submitted: float
    deadline: float | None
    cancelled: bool = False
    told: int = 0  # tokens whose text was looked at
    counted: int = 0  # events that the metrics know
    first_drawn: float | None = None
    last_drawn: float = 0.0

    def due(self, now: float) -> Outcome | None:
        """Why it has to end now, if it has to."""
        if self.cancelled:
            return "cancelled"
        return "timeout" if self.deadline is not None and now >= self.deadline else None

    def further_text(self) -> str:
        """What can be given out since the last time, which is all where the answer has ended."""
        generated = self.batched.request.generated
        text = "".join([self.text.add(token) for token in generated[self.told :]])
        self.told = len(generated)
        return text if self.batched.request.finished is None else text + self.text.rest()


class ServingLoop:
    """Continuous batching of one model over one pool, in a thread of its own that sleeps while nothing is asked."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: BpkvConfig,
        *,
        pool_bytes: int,
        queue_limit: int = 64,
        chunk_tokens: int = 256,
        most_running: int = 64,
        metrics: ServingMetrics | None = None,
        trace: Trace | None = None,
        poison: bool = False,
    ) -> None:
        """`config`: what requests change options of. `queue_limit`: requests that may wait. `chunk_tokens`: of prompts
        that are run in one step. `trace`: the loop's thread has it for itself until `shutdown`. `poison`: free rows of
        the pool are NaN, for tests.

        Raises ConfigError and InputError where model, configuration and sizes do not go together.
        """
        if queue_limit < 1:
            raise InputError(f"queue_limit is {queue_limit}; a request that is to run waits first: give 1 or more.")
        cuda = loaded.model.device.type == "cuda"
        trace = trace or Trace(synchronize=torch.cuda.synchronize if cuda else None)
        pool = make_pool_within(loaded, pool_bytes, config.page_size, poison=poison)
        self.metrics = metrics or ServingMetrics()
        self._loaded, self._queue_limit = loaded, queue_limit
        self._room = free_bytes(loaded.model.device)  # of memory, beside weights and pool
        self._engines = Engines(loaded, config, pool, trace)
        self.batch = ServingBatch(self._engines.host, trace, chunk_tokens=chunk_tokens, most_running=most_running)
        self._encoding = threading.Lock()
        self._changed = threading.Condition()  # guards the four below
        self._clients: dict[int, _Client] = {}
        self._arrived: deque[int] = deque()
        self._closing = False
        self._failed = False
        self._handles = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="bpkv-serving", daemon=True)
        self._thread.start()
        self._report()

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and its last step did not fail for all."""
        return self._thread.is_alive() and not self._failed

    def submit(self, request: ServingRequest, receive: Receive) -> int:
        """Take a request; returns its handle. Any thread may do so.

        `receive` is called from the loop's thread with every piece of the answer, exactly once with a finish_reason,
        and may call `cancel`. Raises at once, with nothing received: InputError, ConfigError and PoolExhausted for what
        can never be served, QueueFull where it may be later.
        """
        try:
            client = self._prepare(request, receive)
            with self._changed:
                self._require_place()
                handle = next(self._handles)
                self._clients[handle] = client
                self._arrived.append(handle)
                self._changed.notify_all()
        except BpkvError:
            self.metrics.ended("refused")
            raise
        return handle

    def check(self, request: ServingRequest) -> None:
        """Raise what `submit` would raise for a request that can never be served, and take nothing."""
        self._prepare(request, lambda _: None)

    def cancel(self, handle: int) -> bool:
        """End a request at the next step, whatever its stage; any thread, any number of times.

        False where it has ended or is unknown; else its last output says "cancelled".
        """
        with self._changed:
            client = self._clients.get(handle)
            if client is None:
                return False
            client.cancelled = True
            return True

    def shutdown(self, timeout_s: float) -> bool:
        """Take no new requests, let those that were taken end, cancel what has not after `timeout_s`, end the thread.

        Returns whether all ended by themselves. Not to be called from `receive`.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._clients, timeout_s)
            for client in self._clients.values():
                client.cancelled = True
        self._thread.join()
        self._report()
        return ended

    def _prepare(self, request: ServingRequest, receive: Receive) -> _Client:
        submitted = time.monotonic()
        request.check()
        engine = self._engines.of(request.options)
        sampling = request.sampling(engine.statistics.stop_tokens)
        with self._encoding:  # tokenizers may not be used by two threads
            prompt = request.encoded(self._loaded.encoder)
        batched = self.batch.prepare(engine, prompt, sampling)
        self._require_memory(engine, len(prompt) + request.max_tokens)
        deadline = None if request.timeout_s is None else submitted + request.timeout_s
        return _Client(batched, AnswerText(self._loaded.tokenizer, request.stop), receive, submitted, deadline)

    def _require_memory(self, engine: Engine, tokens: int) -> None:
        needed = scoring_bytes(self._loaded, tokens, engine.compactor.config)
        if needed > self._room and not engine.compactor.policy.evicts_nothing:
            raise InputError(
                f"Scoring {tokens} tokens with these options takes about {needed / 2**20:,.0f} MiB, more than the "
                f"{self._room / 2**20:,.0f} MiB that the server had free when it started. Shorten the prompt or the "
                "answer, or lower what was raised of top_k, probes, refine and positions."
            )

    def _require_place(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise QueueFull("The server is shutting down and takes no new requests; ask another one, or later.")
        waiting = len(self._arrived) + len(self.batch.waiting)
        if waiting >= self._queue_limit:
            raise QueueFull(f"{waiting} requests wait already, as many as may; ask again later.")

    # In the loop's thread

    def _run(self) -> None:
        try:
            while self._await_requests():
                self._end_what_is_due()
                self._step()
                self._report()
        except Exception as error:  # what goes wrong with requests is dealt with: this is a fault of the loop
            log.exception("the serving loop failed and ends")
            self._abandon(error)

    def _await_requests(self) -> bool:
        """Sleep until there is something to do; False when there will be nothing any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._clients or self._closing)
            while self._arrived:
                self.batch.add(self._clients[self._arrived.popleft()].batched)
            return bool(self._clients)

    def _current(self) -> dict[int, _Client]:
        with self._changed:
            return dict(self._clients)

    def _end_what_is_due(self) -> None:
        now = time.monotonic()
        for handle, client in self._current().items():
            if (reason := client.due(now)) is not None:
                self._end(handle, client, reason)

    def _step(self) -> None:
        clients = {client.batched: (handle, client) for handle, client in self._current().items()}
        took_part = self.batch.step()
        self._failed = self.batch.failed
        for batched in took_part:
            self._answer(*clients[batched])

    def _answer(self, handle: int, client: _Client) -> None:
        """Give out what one step of a request brought."""
        batched, error = client.batched, client.batched.error
        self._count(client)
        if error is not None:
            return self._end(handle, client, "error", error=error)
        try:
            text = client.further_text()
        except Exception as failure:  # the tokenizer's
            return self._end(handle, client, "error", error=failure)
        if client.text.stopped or batched.request.finished is not None:
            reason: Outcome = "stop" if client.text.stopped or batched.request.finished == "stop" else "length"
            return self._end(handle, client, reason, text)
        if text:
            self._send(client, ServingOutput(text, len(batched.request.generated)))

    def _count(self, client: _Client) -> None:
        request, now = client.batched.request, time.monotonic()
        for event in request.events[client.counted :]:
            self.metrics.compacted(event)
        client.counted = len(request.events)
        drawn = len(request.generated) - client.told
        if client.first_drawn is None and (drawn or request.finished == "stop"):
            client.first_drawn = now
            self.metrics.add("bpkv_prompt_tokens_total", len(client.batched.prompt))
            self.metrics.observe("bpkv_time_to_first_token_seconds", now - client.submitted)
        if drawn:
            client.last_drawn = now
            self.metrics.add("bpkv_generated_tokens_total", drawn)

    def _end(
        self, handle: int, client: _Client, reason: Outcome, text: str = "", error: Exception | None = None
    ) -> None:
        """Free what the request holds, then send its last output."""
        self.batch.remove(client.batched)
        with self._changed:  # from here on `cancel` finds nothing; before, it is obeyed
            del self._clients[handle]
            if client.cancelled:
                reason, text, error = "cancelled", "", None
            self._changed.notify_all()
        self.metrics.ended(reason)
        tokens = len(client.batched.request.generated)
        if client.first_drawn is not None and tokens > 1:
            mean = (client.last_drawn - client.first_drawn) / (tokens - 1)
            self.metrics.observe("bpkv_time_per_output_token_seconds", mean)
        self._send(client, _last(client.batched, reason, text, error))

    def _send(self, client: _Client, output: ServingOutput) -> None:
        try:
            client.receive(output)
        except Exception:
            log.exception("the receiver of an answer failed; its request is cancelled")
            client.cancelled = True

    def _abandon(self, error: Exception) -> None:
        """Tell everybody, and take no more: nobody waits for an answer that does not come."""
        with self._changed:
            self._failed = self._closing = True
            clients = list(self._clients.values())
            self._clients.clear()
            self._arrived.clear()
            self._changed.notify_all()
        for client in clients:
            self.metrics.ended("error")
            self._send(client, _last(client.batched, "error", "", error))
        self._report()

    def _report(self) -> None:
        pool, batch = self.batch.pool, self.batch
        self.metrics.set(
            pages_free=pool.free_pages,
            pages_live=pool.live_pages,
            queue_length=len(batch.waiting) + len(self._arrived),
            running=len(batch.running),
            healthy=int(self.healthy),
        )


def _last(batched: BatchedRequest, reason: Outcome, text: str, error: Exception | None) -> ServingOutput:
    events = batched.request.events
    main = next((event for event in events if event.regime != "generation"), events[-1] if events else None)
    return ServingOutput(
        text,
        tokens=len(batched.request.generated),
        finish_reason=reason,
        error=None if error is None else _told(error),
        entries_kept=0 if main is None else main.entries_after,
        entries_total=0 if main is None else main.entries_before,
        bytes_freed=sum(event.bytes_before - event.bytes_after for event in events),
        prompt_tokens=len(batched.prompt),
    )


def _told(error: Exception) -> str:
    """In one paragraph, and nothing of the server's insides."""
    if isinstance(error, BpkvError):
        return str(error)
    return f"The server failed at this request ({type(error).__name__}); its log says more. Ask again later."
