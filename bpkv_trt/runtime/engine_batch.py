"""Static micro-batches over one engine: requests that can share a batch run together until the last has its answer."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import InputError
from bpkv_trt.runtime.engine_runner import EngineAnswer, EngineRunner
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import FinishReason
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.serving_request import ServingRequest


@dataclass(eq=False)
class EngineRequest:
    """One request of an engine, and its answer so far."""

    prompt: Sequence[int]
    sampling: SamplingParams
    config: BpkvConfig
    generated: list[int] = field(default_factory=list)
    events: list[CompactionEvent] = field(default_factory=list)
    finished: FinishReason | None = None
    error: Exception | None = None

    def is_like(self, other: "EngineRequest") -> bool:
        """Whether a session can run both in one batch, which has one configuration and one way to sample."""
        most = max(self.sampling.max_new_tokens, other.sampling.max_new_tokens)
        own, others = (replace(each.sampling, max_new_tokens=most) for each in (self, other))
        return self.config == other.config and own == others


class EngineBatch:
    """TensorRT-LLM's Python session runs a batch from its prompts to its last answer, and nobody joins meanwhile.

    So whoever ends before the batch is answered at once, and its row goes on unseen; when nobody is left the engine
    stops at that step. Those who wait begin together when nothing runs: the oldest, and all that can share its batch.
    """

    def __init__(self, runner: EngineRunner, stop_tokens: frozenset[int], *, most_running: int = 64) -> None:
        """stop_tokens: what ends an answer. most_running: requests in a batch, if the engine takes as many."""
        if most_running < 1:
            raise InputError(f"most_running is {most_running}; a batch is of 1 request or more.")
        self._runner, self._stop_tokens, self._most_running = runner, stop_tokens, most_running
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self.failed = False  # whether the latest step failed, and so all who took part
        self._rows: list[EngineRequest] = []  # of the batch, be they running or not
        self._steps: Generator[list[EngineAnswer], None, None] | None = None

    @property
    def pages_free(self) -> int:
        """Blocks of the batch that runs which no sequence owns; the session takes a new pool for every batch."""
        pool = self._runner.session.running_pool
        return 0 if pool is None else pool.free_pages

    @property
    def pages_live(self) -> int:
        """Blocks that sequences of the batch own."""
        pool = self._runner.session.running_pool
        return 0 if pool is None else pool.live_pages

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt that could ever be served."""
        return self._runner.built.limits.max_input_len

    def prepare(self, request: ServingRequest, prompt: Sequence[int]) -> EngineRequest:
        """Check a request whose text is these tokens; any thread may do so.

        Raises ConfigError for options that the engine cannot have, or a budget that cannot be honoured, and as
        `EngineRunner.check` for a request that is too large for a batch of its own.
        """
        config = self._runner.configured(request.options)
        self._runner.check([prompt], request.max_tokens, config)
        sampling = request.sampling(self._stop_tokens, config.seed)
        return EngineRequest(prompt, sampling if sampling.temperature else sampling.seeded(0), config)

    def add(self, batched: EngineRequest) -> None:
        """Queue a request that was prepared."""
        self.waiting.append(batched)

    def remove(self, batched: EngineRequest) -> None:
        """End a request, whatever its stage, once or again; the last of a batch ends it."""
        if batched in self.waiting:
            self.waiting.remove(batched)
        batched.finished = batched.finished or "aborted"
        if batched in self.running:
            batched.events = self._runner.session.ended(self._rows.index(batched))
            self._leave(batched)

    def step(self) -> list[EngineRequest]:
        """Begin a batch where none runs, by its prompts, else draw a token for every answer.

        Returns the requests that took part. A step that fails ends them all with its error.
        """
        self.failed, answers = False, list[EngineAnswer]()
        try:
            if not self.running:
                self._begin()
            if self._steps is not None:
                answers = next(self._steps)
        except Exception as error:
            self.failed = True
            return self._fail(error)
        took_part = list(self.running)
        for request, answer in zip(self._rows, answers, strict=True):
            if request in took_part:
                self._advance(request, answer)
        return took_part

    def _begin(self) -> None:
        for request in list(self.waiting):
            if self._takes(request):
                self.waiting.remove(request)
                self.running.append(request)
        self._rows = list(self.running)
        if self.running:
            sampling = replace(self.running[0].sampling, max_new_tokens=_most_new_tokens(self.running))
            prompts = [request.prompt for request in self.running]
            self._steps = self._runner.stream(prompts, sampling, self.running[0].config)

    def _takes(self, request: EngineRequest) -> bool:
        """Whether the batch that is put together takes one more."""
        if not self.running:
            return True
        if len(self.running) == self._most_running or not request.is_like(self.running[0]):
            return False
        batch = [*self.running, request]
        try:
            self._runner.check_sizes([len(each.prompt) for each in batch], _most_new_tokens(batch), request.config)
        except Exception:  # whatever it is: in a batch of its own, if there too, it is this request's alone
            return False
        return True

    def _fail(self, error: Exception) -> list[EngineRequest]:
        failed = list(self.running)
        for request in failed:
            request.error = error
            self._leave(request)
        return failed

    def _advance(self, request: EngineRequest, answer: EngineAnswer) -> None:
        request.generated, request.events, request.finished = answer.tokens, answer.events, answer.finished
        if request.finished is None and len(request.generated) == request.sampling.max_new_tokens:
            request.finished = "length"
        if request.finished is not None:
            self.remove(request)

    def _leave(self, request: EngineRequest) -> None:
        self.running.remove(request)
        if not self.running and self._steps is not None:
            self._steps.close()
            self._rows, self._steps = [], None


def _most_new_tokens(requests: Sequence[EngineRequest]) -> int:
    return max(request.sampling.max_new_tokens for request in requests)
