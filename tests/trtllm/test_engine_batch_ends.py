"""An engine behind the serving loop: what is cancelled, over, refused or fails, alone or with all of its batch."""

import threading
import time
from itertools import count

import pytest
import torch

from bpkv_trt.errors import BpkvError, ConfigError, InputError, QueueFull
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine_runner import EngineRunner
from bpkv_trt.runtime.serving_host import open_batch
from bpkv_trt.runtime.serving_request import ServingOutput
from bpkv_trt.serving_settings import ServingSettings
from tests.runtime.received import PATIENCE, Received
from tests.runtime.together import add_together
from tests.trtllm.runner_place import LLAMA
from tests.trtllm.served_engine import asked


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

    add_together(loop, 4)
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
    (asked(1, text="a" * 10_000), InputError, "are .* tokens or more, and at most 400 can be had here"),
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


def test_what_cannot_be_served_is_refused(make_loop, runs):
    loop, received = make_loop(), Received()
    for request, error, words in REFUSED:
        with pytest.raises(error, match=words) as raised:
            loop.check(request)
        loop.submit(request, refused := Received())
        assert refused.last == ServingOutput("", 0, "refused", str(raised.value))
    assert loop.metrics.snapshot().requests["refused"] == len(REFUSED)
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
        add_together(loop, 2)
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
    add_together(loop, len(requests))
    for request, each in zip(requests, received, strict=True):
        loop.submit(request, each)
    for place in (0, 2):
        assert (received[place].last.finish_reason, received[place].text) == ("length", alone(requests[place]).text)
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
