"""An engine behind the serving loop, on TensorRT-LLM's stand-in: micro-batches of requests from any thread."""

import threading
import time
from itertools import count

import pytest

from bpkv_trt.models.stop_tokens import stop_tokens_of
from bpkv_trt.runtime.engine_batch import EngineBatch
from bpkv_trt.runtime.engine_runner import EngineRunner
from tests.runtime.received import PATIENCE, Received
from tests.runtime.together import add_together
from tests.trtllm.runner_place import LLAMA
from tests.trtllm.served_engine import OPTIONS, asked


@pytest.fixture
def batches(monkeypatch):
    """The prompts of every batch that begins."""
    stream, begun = EngineRunner.stream, []

    def noting(self, prompts, *given):
        begun.append(prompts)
        return stream(self, prompts, *given)

    monkeypatch.setattr(EngineRunner, "stream", noting)
    return begun


def kinds():
    """Of unequal lengths, answers, options and ways to sample; each kind of options and sampling more than once."""
    own = (
        {},
        {"options": {"budget": "0.5"}},
        {"temperature": 2.5, "seed": 1},
        {"options": {"regime": "prefill"}},
        {"temperature": 2.5, "seed": 2},
        {"options": {"regime": "deferred", "positions": 2, "defer": 2}},
    )
    return [
        asked(number, tokens=60 + 11 * (number % 5), max_tokens=(3, 18, 7, 1)[number % 4], **own[number % len(own)])
        for number in range(12)
    ]


def test_requests_from_many_threads_are_answered_as_alone(make_loop, loaded, alone, batches):
    """48 of them, some cancelled at random."""
    loop, asked_for, results = make_loop(tokenizer=str(LLAMA)), kinds(), []
    ends = stop_tokens_of(loaded.model, loaded.tokenizer)
    expected = [alone(request, ends) for request in asked_for]
    batches.clear()

    def ask(first):
        for step in range(12):
            number, received = (first * 5 + step * 7) % len(asked_for), Received()
            handle = loop.submit(asked_for[number], received)
            cancelled = (first + step) % 7 == 0
            if cancelled:
                time.sleep(0.02 * step)
                cancelled = loop.cancel(handle)
            results.append((number, received, cancelled))

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, received, cancelled in results:
        last, answer = received.last, expected[number]
        if cancelled:
            assert last.finish_reason == "cancelled" and answer.text.startswith(received.text)
            continue
        assert (last.finish_reason, received.text) == (answer.finished, answer.text), asked_for[number]
        if asked_for[number].max_tokens > 1:
            assert (last.entries_total, last.entries_kept) == answer.entries, asked_for[number]
    assert len(results) == 48 and max(map(len, batches)) == 3 and len(batches) < 48
    counted = loop.metrics.snapshot()
    assert sum(counted.requests.values()) == 48 and counted.requests["error"] == 0
    assert sum(received.last.tokens for _, received, _ in results) == counted.counters["bpkv_generated_tokens_total"]
    assert len({answer.text for answer in expected}) > 9 and {"stop", "length"} == {each.finished for each in expected}


ALIKE = [
    asked(1),
    asked(2, max_tokens=20),
    asked(3, options={"budget": "0.5"}),
    asked(4, seed=7),  # greedy ones draw nothing, so that a seed does not matter
    asked(5, temperature=2.5, seed=1),
    asked(6, temperature=2.5, seed=2),
    asked(7),
    asked(8, options={"budget": "25%"}),  # what the server has, in other words
    asked(9, temperature=2.5, seed=1),
]
SIZES = [
    asked(1, 340, max_tokens=20),
    asked(2, 270),  # more than 600 tokens in one run
    asked(3, max_tokens=150),  # more than 480 in a sequence, each of which may become as long as the longest
    asked(4),
]


@pytest.mark.parametrize(
    ("requests", "most_running", "expected"),
    [
        (ALIKE, 64, [[0, 1, 3], [2], [4, 8], [5], [6, 7]]),  # the engine's own limit is 3
        (ALIKE, 2, [[0, 1], [2], [3, 6], [4, 8], [5], [7]]),
        (SIZES, 64, [[0, 3], [1, 2]]),
    ],
    ids=["alike", "two at most", "sizes"],
)
def test_the_oldest_takes_all_with_it_that_can_share_its_batch(
    make_loop, alone, batches, requests, most_running, expected
):
    loop, prompts = make_loop(most_running=most_running), [alone.prompt(request) for request in requests]
    received = [Received() for _ in requests]
    add_together(loop, len(requests))
    for request, each in zip(requests, received, strict=True):
        loop.submit(request, each)
    assert all(each.last.finish_reason == "length" for each in received)
    assert [[prompts.index(prompt) for prompt in batch] for batch in batches] == expected
    assert [each.text for each in received] == [alone(request).text for request in requests]
    if requests is SIZES:
        assert len(prompts[0]) + len(prompts[1]) > 600 and len(prompts[0]) + 150 > 480 >= len(prompts[1]) + 150


def test_who_ends_before_the_batch_is_answered_at_once(make_loop, alone):
    """And nothing of the others' answers changes by it."""
    loop, order, received = make_loop(), [], [Received() for _ in range(3)]
    requests = [asked(1, max_tokens=1), asked(2, max_tokens=30), asked(3, 120, max_tokens=4)]

    def receiver(number):
        def receive(output):
            received[number](output)
            order.append((number, output.tokens, output.finish_reason))

        return receive

    add_together(loop, len(requests))
    for number, request in enumerate(requests):
        loop.submit(request, receiver(number))
    for request, each in zip(requests, received, strict=True):
        answer = alone(request)
        assert (each.last.finish_reason, each.text) == ("length", answer.text)
        assert (each.last.entries_total, each.last.entries_kept) == answer.entries
        assert each.last.bytes_freed > 0
    ends = [(number, tokens) for number, tokens, reason in order if reason]
    assert ends == [(0, 1), (2, 4), (1, 30)]
    seen = [tokens for number, tokens, _ in order[: order.index((2, 4, "length"))] if number == 1]
    assert max(seen, default=0) <= 4, "the others' tokens came later"


def test_what_a_request_without_a_compaction_is_told(make_loop, alone):
    """One of a batch that ends before its compaction is due, as on the torch host."""
    loop, received = make_loop(), [Received(), Received()]
    deferred = {"regime": "deferred", "positions": 2, "defer": 2}
    requests = [asked(1, max_tokens=2, options=deferred), asked(2, max_tokens=9, options=deferred)]
    add_together(loop, len(requests))
    for request, each in zip(requests, received, strict=True):
        loop.submit(request, each)
    heads = alone.loaded.traits.layers * alone.loaded.traits.kv_heads
    length = len(alone.prompt(requests[0]))
    assert (received[0].last.entries_kept, received[0].last.entries_total) == (heads * (length + 1),) * 2
    assert received[0].last.bytes_freed == 0
    assert received[1].last.entries_kept == heads * ((len(alone.prompt(requests[1])) + 2) // 4)


def test_the_metrics_are_those_of_the_answers(make_loop):
    loop, received, live = make_loop(), [Received() for _ in range(3)], []

    def receive(output):
        received[0](output)
        live.append((loop.batch.pages_live, loop.batch.pages_free, len(loop.batch.running)))

    add_together(loop, len(received))
    for number, each in enumerate(received):
        options = {"regime": "prefill", "budget": "0.4"}
        loop.submit(asked(number, 100, max_tokens=7, options=options), each if number else receive)
    lasts = [each.last for each in received]
    assert loop.shutdown(PATIENCE)
    counted = loop.metrics.snapshot()
    assert counted.counters["bpkv_entries_evicted_total"] == sum(
        each.entries_total - each.entries_kept for each in lasts
    )
    assert counted.counters["bpkv_bytes_freed_total"] == sum(each.bytes_freed for each in lasts) > 0
    assert counted.counters["bpkv_prompt_tokens_total"] == sum(each.prompt_tokens for each in lasts)
    assert counted.counters["bpkv_generated_tokens_total"] == 21
    assert [counted.histograms[name].count for name in sorted(counted.histograms)] == [3, 3, 3]
    (manager,) = loop.batch._runner.session.pools_kv_cache_manager._kv_cache_managers
    for owned, free, running in live[:-1]:
        assert owned > 0 and owned + free == manager.blocks_manager.num_blocks and running == 3


def test_a_bounded_cache_gives_the_same_answers(make_loop, alone):
    loop, received = make_loop(bounded_cache=True), [Received() for _ in range(3)]
    requests = [asked(number, 100 + 20 * number, max_tokens=(8, 40, 25)[number]) for number in range(3)]
    add_together(loop, len(requests))
    for request, each in zip(requests, received, strict=True):
        loop.submit(request, each)
    for request, each in zip(requests, received, strict=True):
        assert each.last.finish_reason == "length" and each.text == alone(request).text


def test_a_stop_string_ends_an_answer_before_it(make_loop, alone):
    loop, received, other = make_loop(), Received(), Received()
    whole = alone(asked(2, max_tokens=30)).text
    stop = whole[7:12]
    add_together(loop, 2)
    loop.submit(asked(2, max_tokens=30, stop=("never there", stop)), received)
    loop.submit(asked(3, max_tokens=30), other)
    assert (received.last.finish_reason, received.text) == ("stop", whole[: whole.index(stop)])
    assert received.last.tokens < 30 and other.last.finish_reason == "length"
    assert other.text == alone(asked(3, max_tokens=30)).text


def test_the_models_end_ends_an_answer(place, loaded, alone):
    """At a token that the engine stops at by itself."""
    requests = [asked(1, max_tokens=12), asked(2, max_tokens=12)]
    first, second = (
        loaded.tokenizer(alone(request).text, add_special_tokens=False)["input_ids"] for request in requests
    )
    place_of_it = next(index for index, token in enumerate(first) if index and token not in {*second, *first[:index]})
    batch = EngineBatch(place.open(**OPTIONS), frozenset({first[place_of_it]}))
    prepared = [batch.prepare(request, alone.prompt(request)) for request in requests]
    for each in prepared:
        batch.add(each)
    steps = count()
    while batch.running or batch.waiting:
        batch.step()
        next(steps)
    assert (prepared[0].generated, prepared[0].finished) == (first[:place_of_it], "stop")
    assert prepared[1].finished == "length" and next(steps) == 12
