"""The serving loop where something goes wrong: whose fault it is, it ends; the others are answered."""

from collections.abc import Sequence
from itertools import count
from threading import Event

import pytest
from torch import Tensor, nan

from bpkv_trt.errors import QueueFull
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.compactor import Compactor
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.page_need import PageNeed
from bpkv_trt.runtime.serving_batch import BatchedRequest, ServingBatch
from bpkv_trt.runtime.serving_loop import LONG
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import ServingOutput
from bpkv_trt.runtime.step import Chunk
from bpkv_trt.runtime.torch_host import TorchHost
from build_scripts.recall_text import recall_prompt
from tests.runtime.asked import alone, asked
from tests.runtime.conftest import MakeLoop, loaded
from tests.runtime.received import PATIENCE, Received
from tests.runtime.together import add_together


def test_a_receiver_that_fails_cancels_its_own_request_only(make_loop: MakeLoop) -> None:
    loop, other, calls = make_loop(), Received(), list[ServingOutput]()

    def failing(output: ServingOutput) -> None:
        calls.append(output)
        raise RuntimeError("the client has gone")

    loop.submit(asked(1, max_tokens=30), failing)
    loop.submit(asked(2), other)
    assert other.last.finish_reason == "length"
    assert loop.shutdown(PATIENCE)
    assert [output.finish_reason for output in calls] == [None, "cancelled"]


def test_logits_that_are_nan_are_an_error_of_one_request(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, broken, other = make_loop(), Received(), Received()
    forward = TorchHost.forward
    doomed = loaded("tiny-llama").encoder.encode_raw(recall_prompt(1, 120)[0])

    def spoil(self: TorchHost, chunks: Sequence[Chunk], **options: bool) -> Tensor:
        logits = forward(self, chunks, **options)
        for row, chunk in enumerate(chunks):
            if self.tokens[chunk.sequence][: len(doomed)] == doomed:
                logits[row] *= nan
        return logits

    monkeypatch.setattr(TorchHost, "forward", spoil)
    loop.submit(asked(1), broken)
    loop.submit(asked(2), other)
    assert broken.last.finish_reason == "error" and "NaN or Inf" in str(broken.last.error)
    assert other.last.finish_reason == "length" and other.last.tokens == 12 and loop.healthy


def test_a_failed_step_is_told_without_the_servers_insides_and_the_loop_goes_on(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, broken, health = make_loop(), Received(), list[bool]()
    forward = TorchHost.forward

    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA went away at /usr/lib/secret.py")

    def receive(output: ServingOutput) -> None:
        health.append(loop.healthy)
        broken(output)

    monkeypatch.setattr(TorchHost, "forward", fail)
    loop.submit(asked(1), receive)
    assert broken.last.finish_reason == "error" and health == [False]
    assert "RuntimeError" in str(broken.last.error) and "secret" not in str(broken.last.error)
    monkeypatch.setattr(TorchHost, "forward", forward)
    again = Received()
    loop.submit(asked(1), again)
    assert again.last.finish_reason == "length" and loop.healthy


class Fault(BaseException):
    """No Exception, as a panic of a library is none."""


@pytest.mark.parametrize("fault", [AssertionError, Fault])
def test_a_loop_that_fails_itself_tells_everybody_and_takes_no_more(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    """Those that run, one that waits and one whose prompt is being encoded; all pages come back."""
    loop, received, gate, encoding = make_loop(most_running=2), [Received() for _ in range(4)], Event(), Event()
    encode = PromptEncoder.encode_raw

    def fail(self: ServingBatch) -> None:
        raise fault("at /usr/lib/secret.py")

    def receive(output: ServingOutput) -> None:
        received[0](output)
        if output.finish_reason is None:
            assert encoding.wait(PATIENCE)
            assert len(loop.batch.running) == 2 and len(loop.batch.waiting) == 1 and loop.batch.pages_live > 0
            monkeypatch.setattr(ServingBatch, "step", fail)

    def slowly(self: PromptEncoder, text: str, most_tokens: int | None = None) -> list[int]:
        if len(text) > LONG:
            encoding.set()
            assert gate.wait(PATIENCE)
        return encode(self, text, most_tokens)

    monkeypatch.setattr(PromptEncoder, "encode_raw", slowly)
    add_together(loop, 3)
    for number, each in enumerate((receive, *received[1:3])):
        loop.submit(asked(number, max_tokens=40), each)
    loop.submit(asked(1, text="a" * (LONG + 1)), received[3])
    for each in received:
        assert each.last.finish_reason == "error"
        assert fault.__name__ in str(each.last.error) and "secret" not in str(each.last.error)
    loop._thread.join(PATIENCE)
    assert loop.failed and not loop.healthy
    counted = loop.metrics.snapshot()
    assert counted.gauges["bpkv_healthy"] == counted.gauges["bpkv_pages_live"] == 0 and counted.requests["error"] == 4
    with pytest.raises(QueueFull, match="has failed .* its log says why. The server has to be restarted"):
        loop.submit(asked(1), Received())
    gate.set()
    assert loop.shutdown(PATIENCE)
    with pytest.raises(QueueFull, match="has failed"):
        loop.submit(asked(1), Received())


def test_what_a_failed_loop_cannot_free_is_no_reason_to_free_nothing_else(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, received, removed = make_loop(), [Received() for _ in range(3)], list[object]()
    remove = ServingBatch.remove

    def fail(self: ServingBatch) -> list[BatchedRequest]:
        assert not self.waiting, "a fault of ours"
        return []

    def remove_but_one(self: ServingBatch, batched: BatchedRequest) -> None:
        removed.append(batched)
        remove(self, batched)
        if len(removed) == 1:
            raise RuntimeError("it cannot be")

    monkeypatch.setattr(ServingBatch, "step", fail)
    monkeypatch.setattr(ServingBatch, "remove", remove_but_one)
    add_together(loop, 3)
    for number, each in enumerate(received):
        loop.submit(asked(number), each)
    assert [each.last.finish_reason for each in received] == ["error"] * 3
    assert len(removed) == 3 and "could not be freed" in caplog.text


def test_a_request_that_cannot_be_opened_is_an_error_of_its_own(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, broken, other = make_loop(), Received(), Received()
    admit, calls = PagedKvPool.admit, count()

    def fail_once(self: PagedKvPool, expected_rows: int = 0) -> int:
        if next(calls) == 0:
            raise MemoryError("at /usr/lib/secret.py")
        return admit(self, expected_rows)

    monkeypatch.setattr(PagedKvPool, "admit", fail_once)
    loop.submit(asked(1), broken)
    loop.submit(asked(2), other)
    assert broken.last.finish_reason == "error" and "(MemoryError)" in str(broken.last.error)
    assert (other.last.finish_reason, other.text) == ("length", alone(asked(2))) and loop.healthy


def test_every_event_of_every_request_is_counted_once(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that end in any way, with what their ends themselves report."""
    loop, counted, batched = make_loop(), list[CompactionEvent](), list[BatchedRequest]()
    compacted, add, handles = ServingMetrics.compacted, ServingBatch.add, dict[str, int]()

    def note(self: ServingMetrics, event: CompactionEvent) -> None:
        counted.append(event)
        compacted(self, event)

    def keep(self: ServingBatch, each: BatchedRequest) -> None:
        batched.append(each)
        add(self, each)

    monkeypatch.setattr(ServingMetrics, "compacted", note)
    monkeypatch.setattr(ServingBatch, "add", keep)
    whole, cancelled, stopped, stop = Received(), Received(), Received(), alone(asked(3))[3:6]

    def receive(output: ServingOutput) -> None:
        cancelled(output)
        if output.tokens == 3:
            loop.cancel(handles["cancelled"])

    loop.submit(asked(1, max_tokens=20), whole)
    with loop._changed:
        handles["cancelled"] = loop.submit(asked(2, max_tokens=40), receive)
    loop.submit(asked(3, max_tokens=40, stop=(stop,)), stopped)
    ends = [each.last.finish_reason for each in (whole, cancelled, stopped)]
    assert ends == ["length", "cancelled", "stop"] and loop.shutdown(PATIENCE)
    events = [event for each in batched for event in each.events]
    assert sorted(map(id, counted)) == sorted(map(id, events)) and len(events) > len(batched)
    assert {each.note is None for each in events} == {True, False}, "some were done, and some never came due"
    numbers = loop.metrics.snapshot().counters
    assert numbers["bpkv_bytes_freed_total"] == sum(each.last.bytes_freed for each in (whole, cancelled, stopped))


def test_a_compaction_that_is_given_up_is_counted(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a prompt that was not compacted has to wait for room, and is run again: two that did not happen."""
    loop, received = make_loop(), Received()
    fits, refusals = ServingBatch._fits, count()

    def lacks_room_once(self: ServingBatch, need: PageNeed) -> bool:
        return fits(self, need) and (need != PageNeed(0, 0) or next(refusals) > 0)

    monkeypatch.setattr(ServingBatch, "_fits", lacks_room_once)
    monkeypatch.setattr(Compactor, "_choose", lambda *_: 3)
    loop.submit(asked(1, options={"regime": "prefill"}), received)
    assert received.last.finish_reason == "length" and next(refusals) == 2
    assert loop.metrics.snapshot().counters["bpkv_fallbacks_total"] == 2


def test_a_compaction_that_did_not_happen_is_counted(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, received = make_loop(), Received()
    monkeypatch.setattr(Compactor, "_choose", lambda *_: 3)
    loop.submit(asked(1, options={"regime": "prefill"}), received)
    assert received.last.finish_reason == "length" and received.last.entries_kept == received.last.entries_total
    assert received.text == alone(asked(1, options={"policy": "full"}))
    counted = loop.metrics.snapshot()
    assert counted.counters["bpkv_fallbacks_total"] == 1 and counted.counters["bpkv_entries_evicted_total"] == 0
