"""The model that Triton's Python backend runs: tensors in, tensors out. What is decided, ServingLoop decides."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from bpkv_trt.documents import check_destination
from bpkv_trt.errors import BpkvError, QueueFull
from bpkv_trt.model_description import check_description
from bpkv_trt.models.placement import device_of
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.serving_host import open_batch
from bpkv_trt.runtime.serving_loop import ServingLoop
from bpkv_trt.runtime.serving_metrics import BOUNDS, COUNTERS, GAUGES, HISTOGRAMS, OUTCOMES, REQUESTS, ServingMetrics
from bpkv_trt.runtime.serving_request import ServingOutput
from bpkv_trt.runtime.triton_request import NAMES, TritonRequest, asks_to_stop, read_request, request_name
from bpkv_trt.serving_settings import ServingSettings
from bpkv_trt.trace_file import traced

POLL_S = 0.1  # between looks whether clients have gone, which Triton does not tell by itself
FAILED = "The server failed at this request; its log says why. Other requests are not affected."
ERRORS = {  # by finish reason
    "cancelled": "CANCELLED",
    "timeout": "UNAVAILABLE",
    "error": "INTERNAL",
    "refused": "INVALID_ARG",
}
LOOP_FAILED = 70  # exit code of the process, which whoever watches it starts again


class TritonPythonModel:
    """One ServingLoop, and a thread that sends what it gives, so that no client keeps the loop waiting."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and start the loop; what is wrong with the repository is the server's message at start."""
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            check_description(json.loads(args["model_config"]))
            self._settings = ServingSettings.read(folder / "model.yaml")
            published = PublishedMetrics(args["model_name"])
            with ExitStack() as tracing:
                trace = tracing.enter_context(_traced(self._settings))
                self._loop = _start(self._settings, ServingMetrics(published.observe), trace)
                self._tracing = tracing.pop_all()
        except BpkvError as error:
            raise pb_utils.TritonModelException(" ".join(str(error).split())) from None
        self._published = published
        self._running: set[Answer] = set()
        self._guard = threading.Lock()  # of the set
        self._outputs: SimpleQueue[tuple[Answer, ServingOutput]] = SimpleQueue()
        self._ended = threading.Event()
        self._sender = threading.Thread(target=self._send_all, name="bpkv-sender", daemon=True)
        self._sender.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the loop; answers go out through their senders."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except BpkvError as error:
                self._loop.metrics.ended("refused")
                code = "UNAVAILABLE" if isinstance(error, QueueFull) else "INVALID_ARG"
                _refuse(sender, self._told(str(error)), code)
            except Exception as error:
                self._loop.metrics.ended("error")
                pb_utils.Logger.log_error(f"bpkv: a request failed: {type(error).__name__}: {error}")
                _refuse(sender, FAILED, "INTERNAL")

    def is_ready(self) -> bool:
        """Asked by servers from 26.03 on."""
        return bool(self._loop.healthy)

    def finalize(self) -> None:
        """End the loop; Triton asks for it when the last of its requests has been answered."""
        self._loop.shutdown(timeout_s=0)
        self._ended.set()
        self._sender.join()
        try:
            self._tracing.close()
        except BpkvError as error:
            pb_utils.Logger.log_error(f"bpkv: {error}")
        del self._loop, self._published  # metrics that outlive this call make the stub of Triton 2.51 crash at its end

    def _take(self, request: Any, sender: Any) -> None:
        tensors, parameters = dict(_tensors(request)), json.loads(request.parameters() or "{}")
        name = request_name(request.request_id(), parameters)
        if asks_to_stop(tensors):
            self._stop(name, sender)
            return
        answer = Answer(name, sender, read_request(tensors, parameters, self._settings))
        with self._guard:
            self._running.add(answer)
        try:
            answer.handle = self._loop.submit(answer.asked.serving, lambda output: self._outputs.put((answer, output)))
        except BaseException:
            self._forget(answer)
            raise

    def _stop(self, name: str, sender: Any) -> None:
        """Cancel what runs under a request's id."""
        with self._guard:
            named = [answer for answer in self._running if name and answer.name == name]
        stopped = [self._loop.cancel(answer.handle) for answer in named]
        if not any(stopped):
            _refuse(sender, "No request runs under this id; it may have ended. Give its request id.", "NOT_FOUND")
            return
        _send(sender, pb_utils.InferenceResponse(_outputs("", "cancelled", None)), last=True)

    def _forget(self, answer: "Answer") -> None:
        with self._guard:
            self._running.discard(answer)

    def _send_all(self) -> None:
        """Outputs as they come, until the loop has ended and all is sent; at times a look at clients and metrics."""
        due = time.monotonic()
        while not (self._ended.is_set() and self._outputs.empty()):
            try:
                self._send_one(*self._outputs.get(timeout=POLL_S))
            except Empty:
                if self._loop.failed and self._outputs.empty():
                    os._exit(LOOP_FAILED)  # all has been told; nothing is under way that the server would wait for
            if time.monotonic() >= due:
                self._look_around()
                due = time.monotonic() + POLL_S
        self._published.publish(self._loop.metrics)

    def _send_one(self, answer: "Answer", output: ServingOutput) -> None:
        if output.finish_reason is not None:
            self._forget(answer)
        if output.error is not None:
            output = replace(output, error=self._told(output.error))
        with answer.failing_alone():
            answer.receive(output)

    def _look_around(self) -> None:
        with self._guard:
            running = list(self._running)
        for answer in running:
            with answer.failing_alone():
                if answer.handle is not None and answer.is_lost():
                    self._loop.cancel(answer.handle)
        self._published.publish(self._loop.metrics)

    def _told(self, error: str) -> str:
        """An error in one paragraph, without the name of what is served, which may be a path of this machine."""
        return " ".join(error.split()).replace(self._settings.source, "the model")


class PublishedMetrics:
    """The loop's numbers as metric families of the server, with the model's name as a label."""

    def __init__(self, model: str) -> None:
        self._labels = {"model": model}
        self._families: list[Any] = []  # a family ends with its object
        kinds = pb_utils.MetricFamily
        meaning = "requests that have ended, or were refused, by outcome"
        requests = self._family(REQUESTS, meaning, kinds.COUNTER)
        self._counters = {name: requests.Metric(labels={**self._labels, "outcome": name}) for name in OUTCOMES}
        self._counters |= {name: self._metric(name, said, kinds.COUNTER) for name, said in COUNTERS.items()}
        self._counted: dict[str, int] = {}  # what the server's counters stand at
        self._observed: deque[tuple[str, float]] = deque()  # and what its histograms have yet to be told
        self._failing = False
        self._gauges = {name: self._metric(name, said, kinds.GAUGE) for name, said in GAUGES.items()}
        self._histograms = {
            name: self._metric(name, said, kinds.HISTOGRAM, buckets=list(BOUNDS)) for name, said in HISTOGRAMS.items()
        }
        beat = (
            "when the model last published its metrics, Unix time: it stands still where the model's process has died"
        )
        self._heartbeat = self._metric("bpkv_heartbeat_seconds", beat, kinds.GAUGE)

    def observe(self, name: str, seconds: float) -> None:
        """An observation of a histogram, from any thread, to be published with all others."""
        self._observed.append((name, seconds))

    def publish(self, metrics: ServingMetrics) -> None:
        """Bring the server's metrics to what the loop counts; what cannot be is logged, and brought the next time."""
        try:
            self._bring(metrics)
            self._failing = False
        except Exception as error:
            if not self._failing:  # once, and not ten times a second
                pb_utils.Logger.log_error(f"bpkv: metrics cannot be published: {type(error).__name__}: {error}")
            self._failing = True

    def _bring(self, metrics: ServingMetrics) -> None:
        now = metrics.snapshot()
        while self._observed:
            name, seconds = self._observed[0]
            self._histograms[name].observe(seconds)
            self._observed.popleft()
        for name, count in {**now.requests, **now.counters}.items():
            if new := count - self._counted.get(name, 0):
                self._counters[name].increment(new)
                self._counted[name] = count
        for name, gauge in self._gauges.items():
            gauge.set(now.gauges[name])
        self._heartbeat.set(time.time())

    def _metric(self, name: str, meaning: str, kind: Any, **options: Any) -> Any:
        return self._family(name, meaning, kind).Metric(labels=self._labels, **options)

    def _family(self, name: str, meaning: str, kind: Any) -> Any:
        self._families.append(pb_utils.MetricFamily(name=name, description=meaning, kind=kind))
        return self._families[-1]


class Answer:
    """What one request is sent: as it comes, or all at once."""

    def __init__(self, name: str, sender: Any, asked: TritonRequest) -> None:
        self.name, self.asked = name, asked
        self.handle: int | None = None  # of the loop, once it has taken the request
        self._sender = sender
        self._text = ""  # not sent yet
        self._failed = False

    def is_lost(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._failed or bool(self._sender.is_cancelled())

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """What goes wrong with this answer ends it, and it is lost; the others go on."""
        try:
            yield
        except Exception as error:
            pb_utils.Logger.log_error(f"bpkv: an answer failed: {type(error).__name__}: {error}")
            self._failed = True
            _refuse(self._sender, FAILED, "INTERNAL")

    def receive(self, output: ServingOutput) -> None:
        """Send what is to be sent now."""
        if self._failed:
            return
        self._text += output.text
        last = output.finish_reason is not None
        if output.finish_reason in ERRORS:
            _refuse(self._sender, _sentence(output), ERRORS[output.finish_reason])
        elif last or (self.asked.streaming and self._text):
            text, self._text = self._text, ""
            reason = output.finish_reason if self.asked.with_finish_reason else None
            _send(self._sender, pb_utils.InferenceResponse(_outputs(text, reason, output if last else None)), last)


def _traced(settings: ServingSettings) -> AbstractContextManager[Trace]:
    """A trace to the end of the model, written where the settings say so."""
    path = None if settings.trace is None else Path(settings.trace)
    if path is not None:
        check_destination(path, flag="trace")
    return traced(path, torch.cuda.synchronize if device_of(settings.device) == "cuda" else None)


def _start(settings: ServingSettings, metrics: ServingMetrics, trace: Trace) -> ServingLoop:
    batch, words = open_batch(settings, trace)
    return ServingLoop(batch, words, queue_limit=settings.queue_limit, metrics=metrics)


def _tensors(request: Any) -> Iterator[tuple[str, Any]]:
    for name in NAMES:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is not None:
            yield name, tensor.as_numpy()


def _outputs(text: str, reason: str | None, end: ServingOutput | None) -> list[Any]:
    """Tensors of a response; `end`: the last output of a request that went well."""
    tensors = [pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))]
    if reason is not None:
        tensors.append(pb_utils.Tensor("finish_reason", np.array([reason.encode()], dtype=object)))
    if end is not None:
        numbers = {
            "bpkv_entries_kept": end.entries_kept,
            "bpkv_entries_total": end.entries_total,
            "bpkv_bytes_freed": end.bytes_freed,
            "bpkv_prompt_tokens": end.prompt_tokens,
            "bpkv_generated_tokens": end.tokens,
        }
        tensors += [pb_utils.Tensor(name, np.array([number], dtype=np.int64)) for name, number in numbers.items()]
    return tensors


def _sentence(output: ServingOutput) -> str:
    if output.error is not None:
        return output.error
    ended = "was cancelled" if output.finish_reason == "cancelled" else "took longer than its time limit"
    return f"The request {ended}, after {output.tokens} tokens."


def _refuse(sender: Any, why: str, code: str) -> None:
    """An error whose message begins with its code, which not every way of asking tells otherwise."""
    error = pb_utils.TritonError(f"{code}: {why}", getattr(pb_utils.TritonError, code))
    _send(sender, pb_utils.InferenceResponse(error=error), last=True)


def _send(sender: Any, response: Any, last: bool) -> None:
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
    try:
        sender.send(response, flags=flags)
    except Exception as error:  # the client has gone; the others go on
        pb_utils.Logger.log_warn(f"bpkv: a response could not be sent: {error}")
