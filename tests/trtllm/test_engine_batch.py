"""An engine behind the serving loop, on TensorRT-LLM's stand-in: micro-batches of requests from any thread."""

import json
import shutil
import threading
import time
from dataclasses import dataclass
from itertools import count

import pytest
import torch

from bpkv_trt.errors import BpkvError, ConfigError, InputError, QueueFull
from bpkv_trt.models.stop_tokens import stop_tokens_of
from bpkv_trt.models.tokenizers import load_tokenizer
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.engine_batch import EngineBatch
from bpkv_trt.runtime.engine_runner import EngineRunner
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.serving_host import open_batch
from bpkv_trt.runtime.serving_loop import ServingLoop
from bpkv_trt.runtime.serving_request import ServingOutput, ServingRequest
from bpkv_trt.serving_settings import ServingSettings
from build_scripts.recall_text import recall_prompt
from tests.runtime.received import PATIENCE, Received
from tests.trtllm.runner_place import LLAMA

OPTIONS = {"budget": "0.25", "interval": 12, "generation_budget": "14t"}  # of the server, in place of the engine's


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """The model's tokenizer without a token that ends answers."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(LLAMA / "tokenizer.json", folder)
    options = json.loads((LLAMA / "tokenizer_config.json").read_text())
    del options["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


@pytest.fixture
def make_loop(place, endless):
    """Loops whose last batch has ended when the test is done."""
    loops = []

    def make(queue_limit=64, **settings):
        served = {"engine": str(place.folder), "tokenizer": str(endless), "options": OPTIONS}
        batch, words = open_batch(ServingSettings(**{**served, **settings}), Trace())
        loops.append(ServingLoop(batch, words, queue_limit=queue_limit))
        return loops[-1]

    yield make
    for loop in loops:
        loop.shutdown(PATIENCE)
        assert not loop.healthy and not loop.batch.waiting and not loop.batch.running
        gauges = loop.metrics.snapshot().gauges
        assert all(gauges[f"bpkv_{name}"] == 0 for name in ("pages_live", "pages_free", "running", "queue_length"))


@pytest.fixture
def batches(monkeypatch):
    """The prompts of every batch that begins."""
    stream, begun = EngineRunner.stream, []

    def noting(self, prompts, *given):
        begun.append(prompts)
        return stream(self, prompts, *given)

    monkeypatch.setattr(EngineRunner, "stream", noting)
    return begun


def asked(number, tokens=90, **options):
    return ServingRequest(**{"text": recall_prompt(number, tokens)[0], "raw": True, "max_tokens": 6, **options})


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


@dataclass(frozen=True)
class Answer:
    text: str
    finished: str
    entries: tuple[int, int]  # before and after the compaction of the prompt


class Alone:
    """What a request is answered that has an engine, or for greedy ones the torch host, to itself."""

    def __init__(self, place, loaded, endless):
        self.runner, self.loaded, self.words = place.open(**OPTIONS), loaded, load_tokenizer(str(endless))

    def __call__(self, request, stop_tokens=frozenset()):
        prompt = self.prompt(request)
        config, sampling = self.runner.configured(request.options), request.sampling(stop_tokens)
        if sampling.temperature == 0:
            pool = make_pool(self.loaded, len(prompt) + request.max_tokens, config.page_size)
            generator = Generator(Engine(self.loaded, config, pool))
            answer = generator.add([prompt], sampling)
            generator.generate([answer])
            tokens, events = answer.generated, answer.events
        else:
            *_, (answer,) = self.runner.stream([prompt], sampling, config)
            tokens, events = answer.tokens, answer.events
        main = next(event for event in events if event.regime != "generation")
        entries = main.entries_before, main.entries_after
        return Answer(self.words.encoder.decode(tokens), answer.finished, entries)

    def prompt(self, request):
        return self.loaded.encoder.encode_raw(request.text)


@pytest.fixture(scope="module")
def alone(place, loaded, endless):
    return Alone(place, loaded, endless)


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
    with loop._changed:  # none begins before all are there
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

    with loop._changed:
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
    with loop._changed:
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

    with loop._changed:
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
    with loop._changed:
        for request, each in zip(requests, received, strict=True):
            loop.submit(request, each)
    for request, each in zip(requests, received, strict=True):
        assert each.last.finish_reason == "length" and each.text == alone(request).text


def test_a_stop_string_ends_an_answer_before_it(make_loop, alone):
    loop, received, other = make_loop(), Received(), Received()
    whole = alone(asked(2, max_tokens=30)).text
    stop = whole[7:12]
    with loop._changed:
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


@pytest.fixture
def runs(place, monkeypatch):
    """The engine's runs so far."""
    run, noted = place.session_place.engine._run, []
    monkeypatch.setattr(place.session_place.engine, "_run", lambda feed: (noted.append(1), run(feed))[1])
    return noted


def test_cancelled_while_waiting_in_the_batch_and_all_of_a_batch(make_loop, alone, runs):
    loop, received, handles = make_loop(), {name: Received() for name in "abcd"}, {}
    gate = threading.Event()
    after = {}

    def receive(output):
        assert gate.wait(PATIENCE)
        received["a"](output)
        if output.tokens == 3 and output.finish_reason is None:
            assert loop.cancel(handles["b"]) and loop.cancel(handles["d"])
        if output.tokens == 6 and output.finish_reason is None:
            assert loop.cancel(handles["a"])
            after["runs"] = len(runs)

    with loop._changed:
        handles["a"] = loop.submit(asked(1, max_tokens=60), receive)
        handles["b"] = loop.submit(asked(2, max_tokens=60), received["b"])
        handles["c"] = loop.submit(asked(3, options={"budget": "0.6"}), received["c"])  # of another batch
        handles["d"] = loop.submit(asked(4, options={"budget": "0.6"}), received["d"])
    gate.set()
    assert received["a"].last.finish_reason == received["b"].last.finish_reason == "cancelled"
    assert received["a"].last.tokens == 6 and received["b"].last.tokens == 3
    answer = alone(asked(2, max_tokens=60))
    assert answer.text.startswith(received["b"].text)
    assert (received["b"].last.entries_total, received["b"].last.entries_kept) == answer.entries
    assert received["d"].last == ServingOutput("", 0, "cancelled", prompt_tokens=received["d"].last.prompt_tokens)
    assert received["c"].last.finish_reason == "length"
    assert received["c"].text == alone(asked(3, options={"budget": "0.6"})).text
    assert not loop.cancel(handles["a"])
    assert loop.shutdown(PATIENCE)
    assert after["runs"] == 6 and len(runs) == 6 + 6, "the engine stops with the last of a batch"


def test_deadlines_end_what_runs_and_what_waits(make_loop, monkeypatch):
    loop, running, waiting = make_loop(most_running=1), Received(), Received()
    honest, ahead = time.monotonic, [0.0]
    monkeypatch.setattr("bpkv_trt.runtime.serving_loop.time.monotonic", lambda: honest() + ahead[0])

    def receive(output):
        running(output)
        if output.tokens == 3:
            ahead[0] = 1000.0

    loop.submit(asked(1, max_tokens=40, timeout_s=500.0), receive)
    loop.submit(asked(2, timeout_s=500.0), waiting)
    assert running.last.finish_reason == "timeout" and running.last.tokens == 3
    assert waiting.last == ServingOutput("", 0, "timeout", prompt_tokens=waiting.last.prompt_tokens)


def test_a_full_queue_refuses_and_later_does_not(make_loop):
    loop, gate, begun, first = make_loop(queue_limit=2), threading.Event(), threading.Event(), Received()

    def receive(output):
        begun.set()
        assert gate.wait(PATIENCE)
        first(output)

    loop.submit(asked(1), receive)
    assert begun.wait(PATIENCE)
    waiting = [Received(), Received()]
    for number, each in enumerate(waiting):
        loop.submit(asked(number), each)
    with pytest.raises(QueueFull, match="2 requests wait"):
        loop.submit(asked(4), Received())
    gate.set()
    assert all(each.last.finish_reason == "length" for each in (first, *waiting))
    again = Received()
    loop.submit(asked(4), again)
    assert again.last.finish_reason == "length"


REFUSED = (
    (asked(1, 500), ConfigError, "max_context_length is .*, and the engine was built for at most 400"),
    (asked(1, 300, max_tokens=250), ConfigError, r"max_context_length \+ max_new_tokens is .* at most 480"),
    (asked(1, max_tokens=3000), InputError, "the engine's model knows 2048 positions"),
    (asked(1, max_tokens=0), ConfigError, "at least 1"),
    (asked(1, text=" "), InputError, "text is empty"),
    (asked(1, options={"budget": "lots"}), ConfigError, "not a budget"),
    (asked(1, options={"budget": "5t"}), ConfigError, "14 tokens per head are protected"),
    (asked(1, options={"budget": "5kB"}), ConfigError, "14 are protected"),
    (asked(1, options={"policy": "snapkv"}), ConfigError, "policy is snapkv, which an engine cannot have"),
    (asked(1, options={"policy": "full"}), ConfigError, "policy is full, which an engine cannot have"),
    (asked(1, options={"scope": "global"}), ConfigError, "scope is global, which an engine cannot have"),
    (asked(1, options={"positions": 5}), ConfigError, "positions is 5, and the engine was built for at most 4"),
    (asked(1, options={"regime": "deferred"}), ConfigError, "the engine has kernels for at most 4"),
    (asked(1, options={"regime": "generation", "budget": "0.2"}), ConfigError, "budget is 0.2, which changes nothing"),
    (asked(1, options={"page_size": 16}), ConfigError, "page_size is 16, and the engine was built for 8"),
)


def test_what_cannot_be_served_is_refused_at_once(make_loop, runs):
    loop, received = make_loop(), Received()
    for request, error, words in REFUSED:
        with pytest.raises(error, match=words):
            loop.submit(request, received)
    assert received.outputs == [] and loop.metrics.snapshot().requests["refused"] == len(REFUSED)
    loop.submit(asked(1, options={"regime": "generation"}), received)
    assert received.last.finish_reason == "length" and received.last.bytes_freed == 0
    assert len(runs) == 6


@pytest.mark.parametrize("stage", ["set-up", "first step", "later"])
def test_a_batch_that_fails_is_told_and_the_next_is_fresh(make_loop, alone, monkeypatch, stage):
    loop, received, health = make_loop(), [Received(), Received()], []
    session = loop.batch._runner.session
    run, steps = session.runtime._run, count()

    def failing(*given):
        return next(steps) < (2 if stage == "later" else 0) and run(*given)

    def full(*given, **named):
        raise torch.OutOfMemoryError("CUDA out of memory at /usr/lib/secret.py")

    def receive(output):
        health.append(loop.healthy)
        received[0](output)

    with monkeypatch.context() as patched:
        where = (session, "setup", full) if stage == "set-up" else (session.runtime, "_run", failing)
        patched.setattr(*where)
        with loop._changed:
            loop.submit(asked(1), receive)
            loop.submit(asked(2), received[1])
        lasts = [each.last for each in received]
    told = "The GPU has no room for the KV cache of 2 sequences" if stage == "set-up" else "could not go on with the"
    for last in lasts:
        assert last.finish_reason == "error" and told in last.error and "secret" not in last.error
        assert last.tokens == (2 if stage == "later" else 0)
    assert health[-1] is False and loop.metrics.snapshot().requests["error"] == 2
    again = Received()
    loop.submit(asked(1), again)
    assert again.last.finish_reason == "length" and again.text == alone(asked(1)).text and loop.healthy


@pytest.mark.parametrize("where", ["in its own batch", "beside others"])
def test_a_batch_that_cannot_be_put_together_ends_who_is_in_it_and_no_others(make_loop, alone, monkeypatch, where):
    loop, received = make_loop(most_running=2), [Received() for _ in range(3)]
    requests = [asked(1), asked(2, 100), asked(3)]
    broken = alone.prompt(requests[1])
    stream, check_sizes = EngineRunner.stream, EngineRunner.check_sizes

    def unable(self, prompts, *given):
        if broken in prompts:
            raise RuntimeError("a fault of ours")
        return stream(self, prompts, *given)

    def uncheckable(self, lengths, *given):
        if len(lengths) > 1 and len(broken) in lengths:
            raise RuntimeError("a fault of ours")
        return check_sizes(self, lengths, *given)

    monkeypatch.setattr(EngineRunner, "check_sizes", uncheckable)
    if where == "in its own batch":
        monkeypatch.setattr(EngineRunner, "stream", unable)
    with loop._changed:
        for request, each in zip(requests, received, strict=True):
            loop.submit(request, each)
    assert received[0].last and received[2].last
    assert [received[place].text for place in (0, 2)] == [alone(requests[place]).text for place in (0, 2)]
    assert received[1].last.finish_reason == ("error" if where == "in its own batch" else "length")


def test_a_fault_of_ours_is_told_without_the_servers_insides(make_loop, monkeypatch):
    loop, received = make_loop(), Received()

    def fail(*given):
        raise RuntimeError("a fault at /usr/lib/secret.py")

    with monkeypatch.context() as patched:
        patched.setattr(loop.batch._runner.session.runtime, "_run", fail)
        loop.submit(asked(1), received)
        assert received.last.finish_reason == "error"
    assert "RuntimeError" in received.last.error and "secret" not in received.last.error


def test_a_shutdown_lets_requests_end_or_cancels_them(make_loop):
    for options, patience, reason in (({}, PATIENCE, "length"), ({"max_tokens": 300}, 0.05, "cancelled")):
        loop, received = make_loop(), [Received() for _ in range(5)]
        for number, each in enumerate(received):
            loop.submit(asked(number, **options), each)
        assert loop.shutdown(patience) == (reason == "length")
        assert {each.last.finish_reason for each in received} == {reason}
        with pytest.raises(QueueFull, match="shutting down"):
            loop.submit(asked(1), Received())


def test_what_a_server_cannot_be_started_with(place, tmp_path):
    served = {"engine": str(place.folder), "tokenizer": str(LLAMA)}
    for changes, words in (
        ({"options": {"scope": "layer"}}, "scope is layer, which an engine cannot have"),
        ({"options": {"budgt": 1}}, "did you mean budget"),
        ({"engine": str(tmp_path)}, "config.json does not exist"),
        ({"plugin_lib": str(tmp_path / "no.so")}, "no.so given by --plugin-lib does not exist"),
        ({"tokenizer": str(tmp_path)}, "comes without a tokenizer"),
        ({"most_running": 0}, "most_running is 0"),
    ):
        with pytest.raises(BpkvError, match=words):
            open_batch(ServingSettings(**{**served, **changes}), Trace())
