"""The serving loop from outside: any thread asks, cancels and shuts down; each request has exactly one end."""

import random
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from bpkv_trt.errors import BpkvError, ConfigError, InputError, PoolExhausted, QueueFull
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.answer_text import AnswerText
from bpkv_trt.runtime.compactor import Compactor
from bpkv_trt.runtime.serving_loop import ServingLoop
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import ServingOutput, ServingRequest
from bpkv_trt.runtime.torch_host import TorchHost
from build_scripts.recall_text import recall_prompt
from tests.runtime.asked import alone, asked
from tests.runtime.conftest import MakeLoop, loaded
from tests.runtime.received import PATIENCE, Received


def requests() -> list[ServingRequest]:
    """Of many kinds."""
    options: Sequence[dict[str, Any]] = (
        {},
        {"budget": "0.5", "scope": "head"},
        {"policy": "h2o"},
        {"regime": "deferred", "defer": 4},
        {"policy": "full"},
        {"regime": "generation"},
    )
    return [
        asked(
            number,
            tokens=30 + 9 * (number % 9),
            max_tokens=(3, 6, 9, 18)[number % 4],
            temperature=float(number % 2),
            seed=number,
            options=options[number % len(options)],
        )
        for number in range(18)
    ]


def test_requests_from_many_threads_are_answered_as_alone(make_loop: MakeLoop) -> None:
    """120 of them, some cancelled at random."""
    loop, kinds = make_loop(rows=400, queue_limit=300, chunk_tokens=32), requests()
    texts = [alone(kind) for kind in kinds]
    assert len(set(texts)) > 15
    results: list[tuple[int, Received, bool]] = []

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20):
            number, received = draw.randrange(len(kinds)), Received()
            handle = loop.submit(kinds[number], received)
            if cancelled := draw.random() < 0.2:
                time.sleep(draw.random() * 0.05)
                cancelled = loop.cancel(handle)
            results.append((number, received, cancelled))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, received, cancelled in results:
        last = received.last
        assert (last.finish_reason == "cancelled") == cancelled
        if cancelled:
            assert texts[number].startswith(received.text)
        else:
            assert last.finish_reason in ("stop", "length") and received.text == texts[number]
    assert len(results) == 120
    counted = loop.metrics.snapshot()
    assert counted.requests["cancelled"] == sum(cancelled for *_, cancelled in results)
    assert sum(counted.requests.values()) == 120
    assert sum(received.last.tokens for _, received, _ in results) == counted.counters["bpkv_generated_tokens_total"]


def test_the_last_output_tells_what_was_kept(make_loop: MakeLoop) -> None:
    loop, received = make_loop(), Received()
    loop.submit(asked(1, max_tokens=5, options={"regime": "prefill"}), received)
    last, prompt = received.last, len(loaded("tiny-llama").encoder.encode_raw(recall_prompt(1, 120)[0]))
    heads = loaded("tiny-llama").traits.layers * loaded("tiny-llama").traits.kv_heads
    assert last.prompt_tokens == prompt and last.tokens == 5 and last.finish_reason == "length"
    assert last.entries_total == heads * prompt and last.entries_kept == heads * int(0.3 * prompt)
    assert last.bytes_freed > 0 and all(not output.prompt_tokens for output in received.outputs[:-1])
    assert recall_prompt(1, 120)[1] in received.text
    counted = loop.metrics.snapshot()
    assert counted.counters["bpkv_entries_evicted_total"] == last.entries_total - last.entries_kept
    assert counted.counters["bpkv_bytes_freed_total"] == last.bytes_freed
    assert counted.counters["bpkv_prompt_tokens_total"] == prompt
    assert [counted.histograms[name].count for name in sorted(counted.histograms)] == [1, 1, 1]


def test_a_stop_string_ends_an_answer_before_it(make_loop: MakeLoop) -> None:
    loop, received, request = make_loop(), Received(), asked(2)
    whole = alone(request)
    stop = whole[7:12]
    loop.submit(asked(2, stop=("never there", stop)), received)
    assert received.last.finish_reason == "stop"
    assert received.text == whole[: whole.index(stop)] and received.last.tokens < 12


def test_stop_tokens_end_an_answer_unless_they_are_ignored(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = frozenset(range(loaded("tiny-llama").model.config.vocab_size))
    monkeypatch.setattr("bpkv_trt.runtime.engine.stop_tokens_of", lambda *_: every)
    loop, ended, whole = make_loop(), Received(), Received()
    loop.submit(asked(2), ended)
    loop.submit(asked(2, ignore_eos=True), whole)
    assert (ended.last.finish_reason, ended.last.tokens) == ("stop", 0)
    assert (whole.last.finish_reason, whole.last.tokens) == ("length", 12)


@pytest.mark.parametrize("over", ["limit", "cancelled"])
def test_a_request_that_is_over_before_the_loop_looked_at_it_harms_nobody(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    loop, long, short = make_loop(), Received(), Received()
    end_what_is_over, came = loop._end_what_is_over, list[int]()

    def just_before() -> None:
        if not came:
            came.append(loop.submit(asked(3, timeout_s=1e-9 if over == "limit" else None), short))
            if over == "cancelled":
                loop.cancel(came[0])
        end_what_is_over()

    monkeypatch.setattr(loop, "_end_what_is_over", just_before)
    loop.submit(asked(2), long)
    assert (long.last.finish_reason, long.text) == ("length", alone(asked(2)))
    assert short.last.finish_reason == ("timeout" if over == "limit" else "cancelled")
    assert loop.healthy


STAGES: dict[str, tuple[type, str]] = {
    "in prefill": (TorchHost, "forward"),
    "before scoring": (Compactor, "on_context_step_end"),
    "scoring": (Compactor, "_choose"),
    "compacting": (type(None), "apply"),
    "decoding": (Compactor, "on_generation_step_end"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("after", [False, True], ids=["begun", "done"])
def test_a_request_is_cancelled_in_every_stage(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, stage: str, after: bool
) -> None:
    """By another thread, while the loop is in that stage: one last output, all pages back, others as alone."""
    loop, doomed, other = make_loop(), Received(), Received()
    owner, name = STAGES[stage]
    holder = loop.batch.pool if owner is type(None) else owner
    honest, answers, handles = getattr(holder, name), list[bool](), list[int]()
    submitted = threading.Event()

    def cancel() -> None:
        assert submitted.wait(PATIENCE)
        if not answers:
            for _ in range(2):
                thread = threading.Thread(target=lambda: answers.append(loop.cancel(handles[0])))
                thread.start()
                thread.join()

    def cancelling(*args: Any, **options: Any) -> Any:
        if not after:
            cancel()
        result = honest(*args, **options)
        if after:
            cancel()
        return result

    monkeypatch.setattr(holder, name, cancelling)
    handles.append(loop.submit(asked(1, max_tokens=40, options={"regime": "prefill"}), doomed))
    submitted.set()
    loop.submit(asked(2), other)
    assert doomed.last.finish_reason == "cancelled" and answers == [True, True]
    assert doomed.last.error is None and not loop.cancel(handles[0]) and not loop.cancel(99)
    assert other.last.finish_reason == "length" and other.text == alone(asked(2))
    assert loop.metrics.snapshot().requests["cancelled"] == 1


def test_one_that_waits_is_cancelled_without_having_run(make_loop: MakeLoop) -> None:
    loop, first, second = make_loop(most_running=1), Received(), Received()
    begun = threading.Event()

    def cancel_second(output: ServingOutput) -> None:
        first(output)
        if not begun.is_set():
            begun.set()
            assert loop.cancel(handle)

    gate = threading.Event()
    handle = -1

    def receive(output: ServingOutput) -> None:
        gate.wait(PATIENCE)
        cancel_second(output)

    loop.submit(asked(1), receive)
    handle = loop.submit(asked(2), second)
    gate.set()
    last = second.last
    assert last == ServingOutput("", 0, "cancelled", prompt_tokens=last.prompt_tokens)
    assert first.last.finish_reason == "length"


def test_a_cancel_within_the_last_output_finds_nothing(make_loop: MakeLoop) -> None:
    loop, ends = make_loop(), list[tuple[str | None, bool]]()
    ended, handles = threading.Event(), list[int]()

    def receive(output: ServingOutput) -> None:
        if output.finish_reason is not None:
            ends.append((output.finish_reason, loop.cancel(handles[0])))
            ended.set()

    with loop._changed:  # the loop begins when the handle is known
        handles.append(loop.submit(asked(1), receive))
    assert ended.wait(PATIENCE) and ends == [("length", False)]


def test_a_cancel_between_the_last_token_and_the_last_output_is_obeyed(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, received, answers, handles = make_loop(), Received(), list[bool](), list[int]()
    rest = AnswerText.rest

    def cancelling(self: AnswerText) -> str:
        answers.append(loop.cancel(handles[0]))
        return rest(self)

    monkeypatch.setattr(AnswerText, "rest", cancelling)
    with loop._changed:
        handles.append(loop.submit(asked(1), received))
    assert received.last.finish_reason == "cancelled" and received.last.text == "" and answers == [True]


def test_timeouts_end_what_runs_and_what_waits(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, running, waiting = make_loop(most_running=1), Received(), Received()
    honest, ahead = time.monotonic, [0.0]
    monkeypatch.setattr("bpkv_trt.runtime.serving_loop.time.monotonic", lambda: honest() + ahead[0])

    def receive(output: ServingOutput) -> None:
        running(output)
        if len(running.outputs) == 3:
            ahead[0] = 1000.0

    loop.submit(asked(1, max_tokens=40, timeout_s=500.0), receive)
    loop.submit(asked(2, timeout_s=500.0), waiting)
    assert running.last.finish_reason == "timeout" and len(running.outputs) == 4 and running.last.tokens == 3
    assert waiting.last == ServingOutput("", 0, "timeout", prompt_tokens=waiting.last.prompt_tokens)
    assert loop.metrics.snapshot().requests["timeout"] == 2


def test_values_that_no_request_can_have_are_refused_at_once(make_loop: MakeLoop) -> None:
    loop = make_loop()
    for request, words in (
        (asked(1, text=" \n"), "text is empty"),
        (asked(1, text="\ud800"), "surrogate"),
        (asked(1, question=""), "question is empty"),
        (asked(1, max_tokens=2.0), "whole number"),
        (asked(1, temperature="warm"), "give a number"),
        (asked(1, seed=-1), "seed"),
        (asked(1, stop=("",)), "0 characters"),
        (asked(1, stop=("a",) * 65), "at most 64"),
        (asked(1, stop="END"), "give strings"),
        (asked(1, timeout_s=0), "positive"),
        (asked(1, options={1: 2}), "names of options"),
    ):
        for take in (lambda request: loop.submit(request, Received()), loop.check):
            with pytest.raises(InputError, match=words):
                take(request)
    assert sum(loop.metrics.snapshot().requests.values()) == 0, "who asked tells, and counts"


def test_who_gives_no_seed_draws_by_that_of_the_server(make_loop: MakeLoop) -> None:
    drawn = {"temperature": 1.0, "options": {"policy": "snapkv"}}

    def answer(loop: ServingLoop, **seed: int) -> str:
        loop.submit(asked(1, **drawn, **seed), received := Received())
        return received.last.finish_reason and received.text

    seeded, plain = make_loop(options={"seed": 5}), make_loop()
    assert answer(seeded) == answer(plain, seed=5) != answer(plain) == answer(seeded, seed=0)


def test_what_cannot_be_served_is_refused(make_loop: MakeLoop) -> None:
    loop = make_loop(rows=96)
    refused: Sequence[tuple[ServingRequest, type[BpkvError], str]] = (
        (asked(1, max_tokens=0), ConfigError, "at least 1"),
        (asked(1, max_tokens=10**6), InputError, "knows 2048 positions"),
        (asked(1, text="a" * 30_000), InputError, "30000 characters, which are .* tokens or more, and at most 2047"),
        (asked(1, temperature=-1.0), ConfigError, "temperature"),
        (asked(1, temperature=float("nan")), ConfigError, "temperature"),
        (asked(1, top_p=0.5), ConfigError, "temperature is 0"),
        (asked(1, options={"budget": "lots"}), ConfigError, "not a budget"),
        (asked(1, options={"policy": "best"}), ConfigError, "not a policy"),
        (asked(1, options={"layer_table": "/etc/passwd"}), ConfigError, "file of the server"),
        (asked(1, max_tokens=200, options={"policy": "full"}), PoolExhausted, "in all"),
    )
    for request, error, words in refused:
        received = Received()
        loop.submit(request, received)
        with pytest.raises(error, match=words) as raised:
            loop.check(request)
        assert received.last == ServingOutput("", 0, "refused", str(raised.value))
        assert received.outputs == [received.last]
    loop.check(asked(1, tokens=20))
    counted = loop.metrics.snapshot()
    assert counted.requests["refused"] == sum(counted.requests.values()) == len(refused)


def test_scoring_that_memory_cannot_hold_is_refused(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpkv_trt.runtime.serving_batch.free_bytes", lambda _: 1 << 28)
    loop, refused, received = make_loop(), Received(), Received()
    loop.submit(asked(1, options={"probes": 1024, "refine": 2**16}), refused)
    assert refused.last.finish_reason == "refused"
    assert re.search("more than the 256 MiB .* lower what was raised of top_k", str(refused.last.error))
    loop.submit(asked(1), received)
    assert received.last.finish_reason == "length"


def test_a_full_queue_refuses_and_later_does_not(make_loop: MakeLoop) -> None:
    loop, gate, taken = make_loop(most_running=1, queue_limit=2), threading.Event(), list[Received]()
    begun = threading.Event()
    first = Received()

    def receive(output: ServingOutput) -> None:
        begun.set()
        assert gate.wait(PATIENCE)
        first(output)

    loop.submit(asked(1), receive)
    assert begun.wait(PATIENCE)
    for number in (2, 3):
        taken.append(Received())
        loop.submit(asked(number), taken[-1])
    with pytest.raises(QueueFull, match="2 requests wait"):
        loop.submit(asked(4), Received())
    gate.set()
    assert all(received.last.finish_reason == "length" for received in (first, *taken))
    again = Received()
    loop.submit(asked(4), again)
    assert again.last.finish_reason == "length"


def test_a_shutdown_lets_requests_end_and_takes_no_more(make_loop: MakeLoop) -> None:
    loop, received = make_loop(most_running=2), [Received() for _ in range(5)]
    for number, each in enumerate(received):
        loop.submit(asked(number), each)
    assert loop.shutdown(PATIENCE) and loop.shutdown(0)
    assert all(each.ended.is_set() and each.last.finish_reason == "length" for each in received)
    with pytest.raises(QueueFull, match="shutting down"):
        loop.submit(asked(1), Received())
    assert not loop.healthy


def test_a_shutdown_cancels_what_has_not_ended_in_time(make_loop: MakeLoop) -> None:
    loop, received = make_loop(most_running=2), [Received() for _ in range(5)]
    for number, each in enumerate(received):
        loop.submit(asked(number, max_tokens=700, temperature=1.0), each)
    assert not loop.shutdown(0.05)
    assert {each.last.finish_reason for each in received} == {"cancelled"}


def test_an_idle_loop_sleeps(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread waits until something is asked, and does nothing meanwhile."""
    loop, received = make_loop(), Received()
    loop.submit(asked(1), received)
    assert received.last.finish_reason == "length"
    steps = list[int]()
    honest = ServingLoop._await_requests
    monkeypatch.setattr(ServingLoop, "_await_requests", lambda self: (steps.append(1), honest(self))[1])
    time.sleep(0.3)
    assert len(steps) <= 1


def test_the_metrics_pass_observations_on_and_sort_them_by_bound() -> None:
    passed = list[tuple[str, float]]()
    metrics = ServingMetrics(lambda name, value: passed.append((name, value)))
    for seconds in (0.0005, 0.001, 0.3, 1000.0):
        metrics.observe("bpkv_compression_seconds", seconds)
    histogram = metrics.snapshot().histograms["bpkv_compression_seconds"]
    assert passed == [("bpkv_compression_seconds", seconds) for seconds in (0.0005, 0.001, 0.3, 1000.0)]
    assert dict(zip((*histogram.bounds, "more"), histogram.counts, strict=True)) == {
        **dict.fromkeys(histogram.bounds, 0),
        0.001: 2,
        0.5: 1,
        "more": 1,
    }
    assert histogram.count == 4 and histogram.sum == pytest.approx(1000.3015)


def test_a_trace_records_what_the_loop_ran(make_loop: MakeLoop) -> None:
    trace = Trace(record=True)
    loop, receivers = make_loop(trace=trace), [Received() for _ in range(3)]
    for number, received in enumerate(receivers):
        loop.submit(asked(number), received)
    prompts = sum(received.last.prompt_tokens for received in receivers)
    loop.shutdown(PATIENCE)
    events = {name: [event for event in trace.events if event.name == name] for name in ("prefill", "score", "compact")}
    assert sum(event.payload or 0 for event in events["prefill"]) == prompts
    assert len(events["score"]) == len(events["compact"]) == 3, "each prompt is compacted once"
    assert {event.thread for event in trace.events} == {loop._thread.native_id}
    assert max(sample.size for sample in trace.memory) > 0
