"""A server's loop: requests from any thread, run together in a thread of its own, answered as their tokens come."""

import itertools
import logging
import threading
import time
from typing import Any

from bpkv_trt.errors import BpkvError, InputError, QueueFull
from bpkv_trt.models.tokenizers import Words
from bpkv_trt.runtime.answer_text import AnswerText
from bpkv_trt.runtime.batch import Batch, Batched
from bpkv_trt.runtime.serving_client import Receive, ServingClient
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import Outcome, ServingOutput, ServingRequest

log = logging.getLogger(__name__)

LONG = 1 << 15  # characters of a text that takes more than a moment to encode
SHUTTING_DOWN = "The server is shutting down and takes no new requests; ask another one, or later."
FAILED = "The serving loop has failed and takes no new requests; its log says why. The server has to be restarted."


class ServingLoop:
    """One batch, in a thread of its own that sleeps while nothing is asked.

    Two further threads encode prompts in the order of their arrival, one of them all that are long, for which nobody
    else has to wait.
    """

    def __init__(
        self, batch: Batch[Any], words: Words, *, queue_limit: int = 64, metrics: ServingMetrics | None = None
    ) -> None:
        """`words`: of the batch's model. `queue_limit`: requests that may wait. The loop's thread has the batch for
        itself until `shutdown`, but for `prepare`."""
        if queue_limit < 1:
            raise InputError(f"queue_limit is {queue_limit}; a request that is to run waits first: give 1 or more.")
        self.batch, self.metrics = batch, metrics or ServingMetrics()
        self._words, self._queue_limit = words, queue_limit
        self._changed = threading.Condition()  # guards the two below
        self._clients: dict[int, ServingClient] = {}  # by handle, in the order of their arrival
        self._closed: str | None = None  # why no further ones are taken
        self._step_failed = False
        self._handles = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="bpkv-serving", daemon=True)
        self._encoders = [
            threading.Thread(target=self._prepare_all, args=(long,), name="bpkv-encoder", daemon=True)
            for long in (False, True)
        ]
        for thread in (self._thread, *self._encoders):
            thread.start()
        self._report()

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and its last step did not fail for all."""
        return self._thread.is_alive() and not self._step_failed

    @property
    def failed(self) -> bool:
        """Whether the thread has ended by a fault of its own, and everybody has been told."""
        return self._closed == FAILED and not self._thread.is_alive()

    def submit(self, request: ServingRequest, receive: Receive) -> int:
        """Take a request, whose time begins; returns its handle at once. Any thread may do so.

        `receive` is called from the loop's thread with every piece of the answer, exactly once with a finish_reason,
        which is "refused" for what turns out, when the prompt has been encoded, never to be served here; it may call
        `cancel`. Raises with nothing taken, received or counted: InputError for a value that no request can have,
        QueueFull where it may be taken later.
        """
        submitted = time.monotonic()
        request.check()
        client = ServingClient(request, AnswerText(self._words.tokenizer, request.stop), receive, submitted)
        with self._changed:
            self._require_place()
            handle = next(self._handles)
            self._clients[handle] = client
            self._changed.notify_all()
        return handle

    def check(self, request: ServingRequest) -> None:
        """Raise what a request that can never be served is refused by, or `submit` raises for it, and take nothing."""
        request.check()
        self._prepare(request)

    def cancel(self, handle: int) -> bool:
        """End a request at the next step, whatever its stage; any thread, any number of times.

        False where it has ended or is unknown; else its last output says "cancelled".
        """
        with self._changed:
            client = self._clients.get(handle)
            if client is None:
                return False
            client.cancelled = True
            self._changed.notify_all()
            return True

    def shutdown(self, timeout_s: float) -> bool:
        """Take no new requests, let those that were taken end, cancel what has not after `timeout_s`, end the threads.

        Returns whether all ended by themselves. A prompt that is being encoded is waited for, though its client is not
        kept waiting. Not to be called from `receive`.
        """
        with self._changed:
            self._closed = self._closed or SHUTTING_DOWN
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._clients, timeout_s)
            for client in self._clients.values():
                client.cancelled = True
            self._changed.notify_all()
        for thread in (self._thread, *self._encoders):
            thread.join()
        self._report()
        return ended

    def _require_place(self) -> None:
        if self._closed is not None:
            raise QueueFull(self._closed)
        if (waiting := self._waiting()) >= self._queue_limit:
            raise QueueFull(f"{waiting} requests wait already, as many as may; ask again later.")

    def _waiting(self) -> int:
        with self._changed:
            return sum(not client.queued for client in self._clients.values()) + len(self.batch.waiting)

    # In the threads that encode

    def _prepare_all(self, long: bool) -> None:
        while (client := self._next_to_prepare(long)) is not None:
            batched, refusal = None, None
            try:
                batched = self._prepare(client.request)
            except BaseException as error:  # a panic of the tokenizers' library is no Exception
                refusal = error
            with self._changed:
                client.batched, client.refusal = batched, refusal
                self._changed.notify_all()

    def _next_to_prepare(self, long: bool) -> ServingClient | None:
        """Sleep until there is one that has not ended; None when there will be none any more."""

        def first() -> ServingClient | None:
            asked = (client for client in self._clients.values() if client.to_prepare)
            return next((client for client in asked if (client.request.characters > LONG) == long), None)

        with self._changed:
            self._changed.wait_for(lambda: first() is not None or self._closed is not None)
            return first()

    def _prepare(self, request: ServingRequest) -> Batched:
        prompt = request.encoded(self._words.encoder, self.batch.most_tokens)
        batched: Batched = self.batch.prepare(request, prompt)
        return batched

    # In the loop's thread

    def _run(self) -> None:
        try:
            while self._await_requests():
                self._end_what_is_over()
                self._step()
                self._report()
        except BaseException as error:  # what goes wrong with requests is dealt with: this is a fault of the loop
            log.exception("the serving loop failed and ends")
            self._abandon(error)

    def _await_requests(self) -> bool:
        """Sleep until there is something to do; False when there will be nothing any more."""
        with self._changed:
            while not self._has_work():
                self._changed.wait(self._patience())
            for client in self._clients.values():
                if client.batched is not None and not client.queued and client.due() is None:
                    self.batch.add(client.batched)
                    client.queued = True
            return bool(self._clients)

    def _has_work(self) -> bool:
        over = self._closed is not None and not self._clients
        return over or any(client.batched is not None or client.due() for client in self._clients.values())

    def _patience(self) -> float:
        """Seconds until the next request is over by its time."""
        deadline = min((client.deadline for client in self._clients.values()), default=float("inf"))
        return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)

    def _current(self) -> dict[int, ServingClient]:
        with self._changed:
            return dict(self._clients)

    def _end_what_is_over(self) -> None:
        for handle, client in self._current().items():
            if (reason := client.due()) is not None:
                self._end(handle, client, reason, error=client.refusal)

    def _step(self) -> None:
        clients = {client.batched: (handle, client) for handle, client in self._current().items() if client.queued}
        if not clients:
            return
        took_part = self.batch.step()
        self._step_failed = self.batch.failed
        for batched in took_part:
            self._answer(*clients[batched], batched)

    def _answer(self, handle: int, client: ServingClient, batched: Batched) -> None:
        """Give out what one step of a request brought."""
        client.count_step(batched, self.metrics)
        if batched.error is not None:
            return self._end(handle, client, "error", error=batched.error)
        try:
            text = client.further_text(batched)
        except Exception as failure:  # the tokenizer's
            return self._end(handle, client, "error", error=failure)
        if client.text.stopped or batched.finished is not None:
            reason: Outcome = "stop" if client.text.stopped or batched.finished == "stop" else "length"
            return self._end(handle, client, reason, text)
        if text:
            self._send(client, ServingOutput(text, len(batched.generated)))

    def _end(
        self, handle: int, client: ServingClient, reason: Outcome, text: str = "", error: BaseException | None = None
    ) -> None:
        """Free what the request holds, then send its last output."""
        if error is not None and not isinstance(error, BpkvError):
            log.error("a request failed", exc_info=error)
        if client.queued:
            self.batch.remove(client.batched)
        with self._changed:  # from here on `cancel` finds nothing; before, it is obeyed
            del self._clients[handle]
            if client.cancelled:
                reason, text, error = "cancelled", "", None
            self._changed.notify_all()
        self._send_last(client, reason, text, error)

    def _send_last(self, client: ServingClient, reason: Outcome, text: str, error: BaseException | None) -> None:
        client.count_end(reason, self.metrics)
        self._send(client, client.last_output(reason, text, error))

    def _send(self, client: ServingClient, output: ServingOutput) -> None:
        try:
            client.receive(output)
        except Exception:
            log.exception("the receiver of an answer failed; its request is cancelled")
            client.cancelled = True

    def _abandon(self, error: BaseException) -> None:
        """Tell everybody, and take no more: nobody waits for an answer that does not come."""
        with self._changed:
            self._step_failed, self._closed = True, FAILED
            clients = list(self._clients.values())
            self._clients.clear()
            self._changed.notify_all()
        for client in clients:
            try:
                if client.queued:
                    self.batch.remove(client.batched)
            except Exception:
                log.exception("what a request held could not be freed")
            self._send_last(client, "error", "", error)
        self._report()

    def _report(self) -> None:
        batch = self.batch
        self.metrics.set(
            pages_free=batch.pages_free,
            pages_live=batch.pages_live,
            queue_length=self._waiting(),
            running=len(batch.running),
            healthy=int(self.healthy),
        )
