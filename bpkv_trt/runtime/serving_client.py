"""One who asked a serving loop for something, and what has become of it so far."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bpkv_trt.errors import BpkvError
from bpkv_trt.runtime.answer_text import AnswerText
from bpkv_trt.runtime.batch import Batched
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import Outcome, ServingOutput, ServingRequest

Receive = Callable[[ServingOutput], None]


@dataclass(eq=False)
class ServingClient:
    """From the arrival of a request to its last output; a loop's lock guards what is set from outside its thread."""

    request: ServingRequest
    text: AnswerText
    receive: Receive
    submitted: float = field(default_factory=time.monotonic)
    batched: Batched | None = None  # once the prompt is encoded
    refusal: BaseException | None = None  # in its place, where that failed
    queued: bool = False  # in the batch
    cancelled: bool = False
    told: int = 0  # tokens whose text was looked at
    counted: int = 0  # events that the metrics know
    first_drawn: float | None = None
    last_drawn: float = 0.0

    @property
    def deadline(self) -> float:
        """When it must have ended."""
        return float("inf") if self.request.timeout_s is None else self.submitted + self.request.timeout_s

    @property
    def to_prepare(self) -> bool:
        """Whether its prompt is yet to be encoded."""
        return self.batched is None and self.refusal is None

    def due(self) -> Outcome | None:
        """Why it has to end now, if it has to."""
        if self.cancelled:
            return "cancelled"
        if self.refusal is not None:
            return "refused" if isinstance(self.refusal, BpkvError) else "error"
        return "timeout" if time.monotonic() >= self.deadline else None

    def further_text(self, batched: Batched) -> str:
        """What can be given out since the last time, which is all where the answer has ended."""
        generated = batched.generated
        text = "".join([self.text.add(token) for token in generated[self.told :]])
        self.told = len(generated)
        return text if batched.finished is None else text + self.text.rest()

    def count_step(self, batched: Batched, metrics: ServingMetrics) -> None:
        """Count what a step brought; to be called once after each, and before its text is looked at."""
        now, drawn = time.monotonic(), len(batched.generated) - self.told
        self._count_events(batched, metrics)
        if self.first_drawn is None and (drawn or batched.finished == "stop"):
            self.first_drawn = now
            metrics.add("bpkv_prompt_tokens_total", len(batched.prompt))
            metrics.observe("bpkv_time_to_first_token_seconds", now - self.submitted)
        if drawn:
            self.last_drawn = now
            metrics.add("bpkv_generated_tokens_total", drawn)

    def count_end(self, outcome: Outcome, metrics: ServingMetrics) -> None:
        """Count the end of the request, which no longer holds anything."""
        metrics.ended(outcome)
        if self.batched is None:
            return
        self._count_events(self.batched, metrics)
        tokens = len(self.batched.generated)
        if self.first_drawn is not None and tokens > 1:
            mean = (self.last_drawn - self.first_drawn) / (tokens - 1)
            metrics.observe("bpkv_time_per_output_token_seconds", mean)

    def last_output(self, reason: Outcome, text: str, error: BaseException | None) -> ServingOutput:
        """With what was kept of the cache, as far as it came."""
        told = None if error is None else _told(error)
        if self.batched is None:
            return ServingOutput(text, 0, reason, told)
        events = self.batched.events
        main = next((event for event in events if event.regime != "generation"), events[-1] if events else None)
        return ServingOutput(
            text,
            tokens=len(self.batched.generated),
            finish_reason=reason,
            error=told,
            entries_kept=0 if main is None else main.entries_after,
            entries_total=0 if main is None else main.entries_before,
            bytes_freed=sum(event.bytes_before - event.bytes_after for event in events),
            prompt_tokens=len(self.batched.prompt),
        )

    def _count_events(self, batched: Batched, metrics: ServingMetrics) -> None:
        for event in batched.events[self.counted :]:
            metrics.compacted(event)
        self.counted = len(batched.events)


def _told(error: BaseException) -> str:
    """In one paragraph, and nothing of the server's insides."""
    if isinstance(error, BpkvError):
        return str(error)
    return f"The server failed at this request ({type(error).__name__}); its log says more. Ask again later."
