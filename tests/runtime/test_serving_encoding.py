"""Prompts are encoded beside everything else: nobody waits for a long one, and whoever asked it is obeyed meanwhile."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from bpkv_trt.errors import InputError, QueueFull
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.runtime.serving_batch import BatchedRequest, ServingBatch
from bpkv_trt.runtime.serving_loop import LONG
from bpkv_trt.runtime.serving_request import ServingRequest
from tests.runtime.asked import alone, asked
from tests.runtime.conftest import MakeLoop
from tests.runtime.received import PATIENCE, Received


@dataclass
class Encoding:
    """Prompts whose text is long are not encoded before `gate` opens, and then come to a short one's tokens."""

    begun: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    texts: list[str] = field(default_factory=list)  # in the order in which they were begun
    error: BaseException | None = None  # raised in place of that


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoding]:
    made, encode = Encoding(), PromptEncoder.encode_raw

    def slowly(self: PromptEncoder, text: str, most_tokens: int | None = None) -> list[int]:
        made.texts.append(text)
        if len(text) > LONG:
            made.begun.set()
            assert made.gate.wait(PATIENCE)
        if made.error is not None:
            raise made.error
        return encode(self, text.strip("#"), most_tokens)

    monkeypatch.setattr(PromptEncoder, "encode_raw", slowly)
    yield made
    made.gate.set()


def long(number: int, **options: Any) -> ServingRequest:
    short = asked(number, **options)
    return asked(number, **{"text": short.text + "#" * LONG, **options})


def test_nobody_waits_while_a_long_prompt_is_encoded(make_loop: MakeLoop, encoding: Encoding) -> None:
    slow, quick, loop = Received(), [Received() for _ in range(3)], make_loop()
    loop.submit(long(1), slow)
    assert encoding.begun.wait(PATIENCE)
    for number, each in enumerate(quick):
        loop.submit(asked(number), each)
    assert all(each.last.finish_reason == "length" for each in quick) and not slow.outputs
    encoding.gate.set()
    assert slow.last.finish_reason == "length"
    assert loop.shutdown(PATIENCE)
    assert [each.text for each in quick] == [alone(asked(number)) for number in range(3)]
    assert slow.text == alone(asked(1))


def test_prompts_of_a_kind_are_begun_in_the_order_of_their_arrival(
    make_loop: MakeLoop, encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, received, added, add = make_loop(), [Received() for _ in range(8)], list[int](), ServingBatch.add
    texts = ["a " * (9 + number) for number in range(8)]
    tokens = [len(loop._words.encoder.encode(text, raw=True)[0]) for text in texts]

    def note(self: ServingBatch, batched: BatchedRequest) -> None:
        added.append(tokens.index(len(batched.prompt)))
        add(self, batched)

    monkeypatch.setattr(ServingBatch, "add", note)
    for number, each in enumerate(received):
        loop.submit(asked(1, text=texts[number] + "#" * (LONG * (number % 2))), each)
    encoding.gate.set()
    assert all(each.last.finish_reason == "length" for each in received)
    assert [number for number in added if number % 2 == 0] == [0, 2, 4, 6]
    assert [number for number in added if number % 2] == [1, 3, 5, 7]


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_a_request_is_over_at_once_while_its_prompt_is_encoded(
    make_loop: MakeLoop, encoding: Encoding, reason: str
) -> None:
    """Be it begun or not; and what is over is not encoded any more."""
    loop, over, later = make_loop(), [Received(), Received()], Received()
    limit = 0.2 if reason == "timeout" else None
    handles = [loop.submit(long(number, timeout_s=limit), each) for number, each in enumerate(over)]
    loop.submit(long(5), later)
    assert encoding.begun.wait(PATIENCE)
    if reason == "cancelled":
        assert all(map(loop.cancel, handles))
    assert [each.last.finish_reason for each in over] == [reason, reason]
    assert not encoding.gate.is_set() and not any(map(loop.cancel, handles))
    encoding.gate.set()
    assert later.last.finish_reason == "length"
    assert encoding.texts == [long(0).text, long(5).text]
    assert loop.metrics.snapshot().requests[reason] == 2


def test_the_time_of_a_request_begins_with_its_arrival(make_loop: MakeLoop, encoding: Encoding) -> None:
    """What passes while it is encoded counts: to its limit, and to its first token."""
    loop, received, begun = make_loop(), Received(), time.monotonic()
    loop.submit(long(1), received)
    assert encoding.begun.wait(PATIENCE)
    time.sleep(0.3)
    encoding.gate.set()
    assert received.last.finish_reason == "length"
    first = loop.metrics.snapshot().histograms["bpkv_time_to_first_token_seconds"]
    assert first.count == 1 and 0.3 <= first.sum <= time.monotonic() - begun


def test_prompts_that_are_encoded_have_places_in_the_queue(make_loop: MakeLoop, encoding: Encoding) -> None:
    """A flood of long texts is refused before it fills the memory; who leaves gives the place back."""
    loop, received = make_loop(queue_limit=3), [Received() for _ in range(4)]
    handles = [loop.submit(long(number), each) for number, each in enumerate(received[:3])]
    for request in (long(9), asked(9)):
        with pytest.raises(QueueFull, match="3 requests wait already"):
            loop.submit(request, Received())
    assert encoding.begun.wait(PATIENCE) and loop.cancel(handles[0])
    assert received[0].last.finish_reason == "cancelled"
    loop.submit(asked(3), received[3])
    assert received[3].last.finish_reason == "length"
    encoding.gate.set()
    assert [each.last.finish_reason for each in received[1:3]] == ["length", "length"]


def test_they_are_counted_as_waiting(make_loop: MakeLoop, encoding: Encoding) -> None:
    loop, slow, quick = make_loop(), Received(), Received()
    loop.submit(long(1), slow)
    assert encoding.begun.wait(PATIENCE)
    loop.submit(asked(2), quick)
    assert quick.last.finish_reason == "length"
    assert loop.metrics.snapshot().gauges["bpkv_queue_length"] == 1
    encoding.gate.set()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_shutdown_tells_those_whose_prompts_are_encoded(
    make_loop: MakeLoop, encoding: Encoding, in_time: bool
) -> None:
    """Their answers where there is time for them, or at once that there is none; the threads end after that."""
    loop, received = make_loop(), [Received(), Received()]
    for number, each in enumerate(received):
        loop.submit(long(number), each)
    assert encoding.begun.wait(PATIENCE)
    ended = list[bool]()
    closing = threading.Thread(target=lambda: ended.append(loop.shutdown(PATIENCE if in_time else 0)))
    closing.start()
    if not in_time:
        assert [each.last.finish_reason for each in received] == ["cancelled", "cancelled"]
    encoding.gate.set()
    closing.join(PATIENCE)
    assert ended == [in_time] and not any(thread.is_alive() for thread in (loop._thread, *loop._encoders))
    assert {each.last.finish_reason for each in received} == {"length" if in_time else "cancelled"}


class Panic(BaseException):
    """What a panic of a library written in Rust comes as."""


@pytest.mark.parametrize(
    ("error", "reason", "told"),
    [
        (InputError("it has no end"), "refused", "it has no end"),
        (RuntimeError("at /usr/lib/secret.py"), "error", "(RuntimeError)"),
        (Panic("at /usr/lib/secret.rs"), "error", "(Panic)"),
    ],
)
@pytest.mark.parametrize("size", [asked, long])
def test_a_prompt_that_cannot_be_encoded_ends_its_request_alone(
    make_loop: MakeLoop, encoding: Encoding, error: BaseException, reason: str, told: str, size: Any
) -> None:
    loop, broken, other, encoding.error = make_loop(), Received(), Received(), error
    encoding.gate.set()
    loop.submit(size(1), broken)
    assert broken.last.finish_reason == reason and told in str(broken.last.error)
    assert "secret" not in str(broken.last.error)
    encoding.error = None
    loop.submit(size(1), other)
    assert other.last.finish_reason == "length" and loop.healthy
    counted = loop.metrics.snapshot().requests
    assert counted[reason] == counted["length"] == 1 and sum(counted.values()) == 2
