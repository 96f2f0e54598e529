"""A server's loop: requests from any thread, run together in a thread of its own, answered as their tokens come."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bpkv_trt.errors import BpkvError, InputError, QueueFull
from bpkv_trt.models.tokenizers import Words
from bpkv_trt.runtime.answer_text import AnswerText
from bpkv_trt.runtime.batch import Batch, Batched
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import Outcome, ServingOutput, ServingRequest

log = logging.getLogger(__name__)

Receive = Callable[[ServingOutput], None]


@dataclass(eq=False)
class _Client:
    """Who asked, what became of it so far, and by when it must have ended."""

    batched: Batched
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
        generated = self.batched.generated
        text = "".join([self.text.add(token) for token in generated[self.told :]])
        self.told = len(generated)
        return text if self.batched.finished is None else text + self.text.rest()


class ServingLoop:
    """One batch, in a thread of its own that sleeps while nothing is asked."""

    def __init__(
        self, batch: Batch[Any], words: Words, *, queue_limit: int = 64, metrics: ServingMetrics | None = None
    ) -> None:
        """`words`: of the batch's model. `queue_limit`: requests that may wait. The loop's thread has the batch for
        itself until `shutdown`, but for `prepare`."""
        if queue_limit < 1:
            raise InputError(f"queue_limit is {queue_limit}; a request that is to run waits first: give 1 or more.")
        self.batch, self.metrics = batch, metrics or ServingMetrics()
        self._words, self._queue_limit = words, queue_limit
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
        with self._encoding:  # tokenizers may not be used by two threads
            prompt = request.encoded(self._words.encoder)
        batched = self.batch.prepare(request, prompt)
        deadline = None if request.timeout_s is None else submitted + request.timeout_s
        return _Client(batched, AnswerText(self._words.tokenizer, request.stop), receive, submitted, deadline)

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
        if client.text.stopped or batched.finished is not None:
            reason: Outcome = "stop" if client.text.stopped or batched.finished == "stop" else "length"
            return self._end(handle, client, reason, text)
        if text:
            self._send(client, ServingOutput(text, len(batched.generated)))

    def _count(self, client: _Client) -> None:
        batched, now = client.batched, time.monotonic()
        for event in batched.events[client.counted :]:
            self.metrics.compacted(event)
        client.counted = len(batched.events)
        drawn = len(batched.generated) - client.told
        if client.first_drawn is None and (drawn or batched.finished == "stop"):
            client.first_drawn = now
            self.metrics.add("bpkv_prompt_tokens_total", len(batched.prompt))
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
            if handle in self._arrived:  # it came after the last look, and was over before the next one
                self._arrived.remove(handle)
            if client.cancelled:
                reason, text, error = "cancelled", "", None
            self._changed.notify_all()
        self.metrics.ended(reason)
        tokens = len(client.batched.generated)
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
        batch = self.batch
        self.metrics.set(
            pages_free=batch.pages_free,
            pages_live=batch.pages_live,
            queue_length=len(batch.waiting) + len(self._arrived),
            running=len(batch.running),
            healthy=int(self.healthy),
        )


def _last(batched: Batched, reason: Outcome, text: str, error: Exception | None) -> ServingOutput:
    events = batched.events
    main = next((event for event in events if event.regime != "generation"), events[-1] if events else None)
    return ServingOutput(
        text,
        tokens=len(batched.generated),
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
