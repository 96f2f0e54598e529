"""What a serving loop runs: requests as tokens, taken together step by step, on whatever host."""

from collections.abc import Sequence, Sized
from typing import Protocol, TypeVar

from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import FinishReason
from bpkv_trt.runtime.serving_request import ServingRequest


class Batched(Protocol):
    """A request that a batch has prepared, as far as it came; compared by identity."""

    @property
    def prompt(self) -> Sequence[int]:
        """Its tokens."""

    @property
    def generated(self) -> Sequence[int]:
        """Tokens of its answer; they only become more."""

    @property
    def events(self) -> Sequence[CompactionEvent]:
        """What was compacted of its cache; they only become more."""

    @property
    def finished(self) -> FinishReason | None:
        """None while it waits or runs."""

    @property
    def error(self) -> Exception | None:
        """What ended it, where something went wrong."""


Each = TypeVar("Each", bound=Batched)


class Batch(Protocol[Each]):
    """Requests that wait and requests that run; one thread runs it, and `prepare` may be called by any."""

    @property
    def waiting(self) -> Sized:
        """Those that were added, and have not begun."""

    @property
    def running(self) -> Sized:
        """Those that have begun, and have not ended."""

    @property
    def pages_free(self) -> int:
        """Pages of the pool that nobody owns."""

    @property
    def pages_live(self) -> int:
        """Pages of the pool that sequences own."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt that could ever be served."""

    @property
    def failed(self) -> bool:
        """Whether the latest step failed, and so all who took part."""

    def prepare(self, request: ServingRequest, prompt: Sequence[int]) -> Each:
        """Check a request whose text is these tokens. Raises a BpkvError for what can never be served."""

    def add(self, batched: Each) -> None:
        """Queue a request that was prepared."""

    def remove(self, batched: Each) -> None:
        """End a request, whatever its stage, once or again; what it held is free when this returns."""

    def step(self) -> list[Each]:
        """Admit who can be, and bring those who run a step further; returns who took part.

        Who goes wrong is ended with its `error`, be it at its admission; nothing is raised for it.
        """
