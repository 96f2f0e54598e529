"""The real server, and clients that send nonsense, ask for too much, or leave: the others are answered as ever."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from build_scripts.recall_text import induction_prompt, recall_prompt
from tests.serving.alone import alone
from tests.serving.clients import Refused, generate, generate_stream, infer_stream, post, tensors
from tests.serving.conftest import TINY, Serve
from tests.serving.soak import soak
from tests.serving.triton_server import KEY, TritonServer

TEXT = recall_prompt(11, 300)[0]
TOKENS = 12
ENDLESS: dict[str, Any] = {  # a request whose answer goes on until it is ended: for some seconds
    "text": induction_prompt(1, 60)[0],
    "bpkv_raw": True,
    "bpkv_policy": "snapkv",
    "sampling_param_max_tokens": 1500,
}
LEAKS = ("Traceback", 'File "', ".py", "/", "\\n  ")
CANCELLED, REFUSED = 'bpkv_requests_total{outcome="cancelled"}', 'bpkv_requests_total{outcome="refused"}'


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[TritonServer]:
    options = ("--budget", "0.5", "--pool-size", "4MiB", "--queue-limit", "4", "--most-running", "4")
    with serve(*options, "--most-new-tokens", "1600", "--most-text-bytes", "100000") as started:
        yield started


@pytest.fixture(autouse=True)
def others_are_answered(server: TritonServer) -> Iterator[None]:
    """After every fault: the right answer for the next client, no page lost, the same process."""
    process = server.model_process()
    yield
    answered = generate(server, TEXT, bpkv_raw=True, bpkv_policy="snapkv", sampling_param_max_tokens=TOKENS)
    expected, kept, freed = alone(TEXT, "0.5", TOKENS, "snapkv")
    last = (answered.last["bpkv_entries_kept"], answered.last["bpkv_bytes_freed"])
    assert (answered.text, *last) == (expected, kept, freed)
    left = server.metrics_when("bpkv_running", 0)
    assert left["bpkv_pages_live"] == 0 and left["bpkv_queue_length"] == 0 and left["bpkv_healthy"] == 1
    assert server.model_process() == process


def is_clean(message: str) -> bool:
    """One paragraph, without a traceback or a path of the machine."""
    return bool(message) and not any(leak in message for leak in LEAKS)


BODIES = {
    "no JSON": (b"{", 400, 599),
    "nothing": (b"", 400, 599),
    "no object": (b"[1, 2]", 400, 599),
    "no inputs": (b"{}", 400, 400),
    "a number for text": (b'{"text_input": 7}', 400, 599),
    "two texts": (b'{"text_input": ["a", "b"]}', 400, 400),
    "an object for text": (b'{"text_input": {"a": 1}}', 400, 599),
    "null": (b'{"text_input": null}', 400, 599),
    "text for a number": (b'{"text_input": "a", "sampling_param_max_tokens": "ten"}', 400, 599),
    "a number too large": (b'{"text_input": "a", "sampling_param_max_tokens": 99999999999999}', 400, 599),
    "a negative seed": (b'{"text_input": "a", "sampling_param_seed": -1}', 400, 599),
    "a large seed": (b'{"text_input": "a", "sampling_param_seed": 18446744073709551615}', 400, 400),
    "a number for a switch": (b'{"text_input": "a", "stop": 7}', 400, 599),
    "no UTF-8": (b'{"text_input": "\xff\xfe"}', 400, 599),
    "half a surrogate pair": (b'{"text_input": "\\ud800"}', 400, 599),
    "brackets": (b'{"text_input": ' + b"[" * 500 + b"]" * 500 + b"}", 400, 599),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request_is_refused(server: TritonServer, name: str) -> None:
    body, least, most = BODIES[name]
    status, answer = post(server, "generate", body)
    assert least <= status <= most and is_clean(json.loads(answer)["error"]), answer


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"sampling_param_max_tokens": 0}, "gives 1 to 1600"),
    "less": ({"sampling_param_max_tokens": -5}, "gives 1 to 1600"),
    "more tokens than the server gives": ({"sampling_param_max_tokens": 1601}, "gives 1 to 1600"),
    "budget 0": ({"bpkv_budget": "0"}, "an empty cache cannot answer"),
    "budget above 1": ({"bpkv_budget": "1.5"}, "a fraction above 1"),
    "a negative budget": ({"bpkv_budget": "-0.2"}, "not a budget"),
    "budget NaN": ({"bpkv_budget": "nan"}, "not a budget"),
    "budget below what is protected": ({"bpkv_budget": "3t"}, "36 tokens per head are protected"),
    "no budget": ({"bpkv_budget": ""}, "not a budget"),
    "a long budget": ({"bpkv_budget": "9" * 5000}, "short text"),
    "no policy": ({"bpkv_policy": "best"}, "choose from"),
    "no regime": ({"bpkv_regime": "sometimes"}, "not a regime"),
    "a policy without that regime": ({"bpkv_policy": "kvzip", "bpkv_regime": "generation"}, "regime"),
    "temperature": ({"sampling_param_temperature": -1.0}, "temperature is"),
    "infinite temperature": ({"sampling_param_temperature": 1e39}, "temperature is"),
    "top_p": ({"sampling_param_temperature": 1.0, "sampling_param_top_p": 0.0}, "top_p is"),
    "top_p of a greedy answer": ({"sampling_param_top_p": 0.5}, "would change nothing"),
    "an empty stop string": ({"sampling_param_stop": [""]}, "characters"),
    "many stop strings": ({"sampling_param_stop": ["a"] * 100}, "at most 64"),
    "no time": ({"bpkv_timeout_s": 0.0}, "more than 0"),
    "more time than the server gives": ({"bpkv_timeout_s": 1e6}, "at most 600"),
    "an empty question": ({"bpkv_question": " "}, "empty"),
    "an unknown input": ({"bpkv_buget": "0.2"}, "did you mean bpkv_budget"),
    "one of TensorRT-LLM's that we lack": ({"sampling_param_top_k": 5}, "is no input of this model"),
    "stop without a request": ({"stop": True, "id": "nobody's"}, "No request runs under this id"),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_cannot_be_honoured_is_refused_and_told_why(server: TritonServer, name: str) -> None:
    inputs, why = VALUES[name]
    with pytest.raises(Refused) as refused:
        generate(server, TEXT, **inputs)
    assert refused.value.status == 400
    assert why in refused.value.message and is_clean(refused.value.message.replace("/work", "")), refused.value.message


CONVERSATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "beside a text": ({"text_input": "a"}, "both given"),
    "beside a question": ({"bpkv_question": "Why?"}, "into the last one of the user"),
    "raw": ({"bpkv_raw": True}, "chat template"),
    "no JSON": ({"bpkv_messages": "["}, "JSON"),
    "no role of ours": ({"bpkv_messages": '[{"role": "tool", "content": "a"}]'}, "system, user or assistant"),
    "blank": ({"bpkv_messages": '[{"role": "user", "content": " "}]'}, "empty"),
    "long": ({"bpkv_messages": f'[{{"role": "user", "content": "{"a" * 100_000}"}}]'}, "takes up to 100000"),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_that_cannot_be_had_is_refused_and_told_why(server: TritonServer, name: str) -> None:
    inputs, why = CONVERSATIONS[name]
    with pytest.raises(Refused) as refused:
        generate(server, None, **{"bpkv_messages": '[{"role": "user", "content": "a"}]', **inputs})
    assert refused.value.status == 400 and why in refused.value.message and is_clean(refused.value.message)


@pytest.mark.parametrize("text", ["", "  ", "\n"], ids=["empty", "blank", "newline"])
def test_nothing_to_answer_is_refused(server: TritonServer, text: str) -> None:
    with pytest.raises(Refused, match="empty"):
        generate(server, text)


def test_prompts_that_can_never_be_served_are_refused_at_once(server: TritonServer) -> None:
    """Longer than the model knows, than the pool holds, and than is read."""
    begun = time.monotonic()
    for text, why in (
        ("the snow is bright. " * 500, "knows 2048 positions"),
        (recall_prompt(1, 1900)[0], "page|pool"),
        ("a" * 100_001, "takes up to 100000"),
        ("a" * (8 << 20), "takes up to 100000"),
    ):
        with pytest.raises(Refused, match=why) as refused:
            generate(server, text, sampling_param_max_tokens=100, bpkv_budget="1")
        assert refused.value.status == 400 and is_clean(refused.value.message)
    assert time.monotonic() - begun < 30


def test_tensors_of_other_types_and_shapes_are_refused(server: TritonServer) -> None:
    """Over gRPC, where a client says types and shapes itself."""
    wrong_type = grpc_client.InferInput("text_input", [1], "INT32")
    wrong_type.set_data_from_numpy(np.array([1], dtype=np.int32))
    wrong_shape = grpc_client.InferInput("text_input", [2, 2], "BYTES")
    wrong_shape.set_data_from_numpy(np.array([["a", "b"], ["c", "d"]], dtype=np.object_))
    no_utf8 = grpc_client.InferInput("text_input", [1], "BYTES")
    no_utf8.set_data_from_numpy(np.array([b"\xff"], dtype=np.object_))
    for inputs in ([wrong_type], [wrong_shape], [no_utf8], [], tensors({"text_input": "a", "unknown": "b"})):
        message = stream_error(server, inputs)
        assert is_clean(message), message


def stream_error(server: TritonServer, inputs: list[Any]) -> str:
    """The message of the error that a request over gRPC ends with."""
    arrived: list[Any] = []
    came = threading.Event()

    def receive(result: Any, error: Any) -> None:
        arrived.append(error)
        came.set()

    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(receive)
        client.async_stream_infer("bpkv", inputs)
        assert came.wait(30)
    assert isinstance(arrived[0], InferenceServerException)
    return str(arrived[0].message())


def test_http_infer_is_refused_by_the_server_for_models_that_stream(server: TritonServer) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    status, answer = post(server, "infer", json.dumps(body).encode())
    assert status == 501 and "decoupled" in json.loads(answer)["error"]


def test_what_is_not_for_clients_needs_the_key(server: TritonServer) -> None:
    for path in ("/v2/repository/index", "/v2/repository/models/bpkv/unload"):
        assert request(server, path)[0] == 403
    assert request(server, "/v2/repository/index", f"bpkv-admin-key: {KEY}\r\n")[0] == 200
    status, answer = request(server, "/v2/repository/models/bpkv/unload", f"bpkv-admin-key: {KEY}\r\n")
    assert status in (400, 503) and "explicit" in answer, "the repository is as it was at the start"


def request(server: TritonServer, path: str, headers: str = "") -> tuple[int, str]:
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\n{headers}Content-Length: 2\r\nConnection: close\r\n\r\n"
    with connected(server) as client:
        client.sendall(head.encode() + b"{}")
        answer = client.makefile("rb").read().decode()
    return int(answer.split()[1]), answer


def connected(server: TritonServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.http), timeout=60)


def test_headers_without_a_body_and_bodies_cut_short_wait_for_nobody(server: TritonServer) -> None:
    clients = [connected(server) for _ in range(8)]
    for client in clients:
        client.sendall(b"POST /v2/models/bpkv/generate HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{")
    assert generate(server, TEXT, sampling_param_max_tokens=2).text
    for client in clients:
        client.close()


def test_a_client_that_leaves_ends_its_request(server: TritonServer) -> None:
    """In the middle of its stream, over HTTP."""
    before = server.metrics()[CANCELLED]
    inputs = {("text_input" if name == "text" else name): value for name, value in ENDLESS.items()}
    body = json.dumps({**inputs, "streaming": True}).encode()
    with connected(server) as client:
        head = f"POST /v2/models/bpkv/generate_stream HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert b"data: " in client.recv(65536) + client.recv(65536)
        assert server.metrics_when("bpkv_running", 1)["bpkv_pages_live"] > 0
    assert server.metrics_when(CANCELLED, before + 1)["bpkv_pages_live"] == 0


def test_a_client_that_leaves_its_grpc_stream_ends_its_request(server: TritonServer) -> None:
    before, came = server.metrics()[CANCELLED], threading.Event()
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: came.set())
        sent = tensors({"text_input": ENDLESS["text"], "streaming": True, "sampling_param_max_tokens": 1500})
        client.async_stream_infer("bpkv", sent)
        assert came.wait(30)
        client.stop_stream(cancel_requests=True)
    server.metrics_when(CANCELLED, before + 1)


def test_a_request_is_stopped_by_its_id(server: TritonServer) -> None:
    """From another connection; who asked is told, and stopping it again is refused."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, id="mine", **ENDLESS)
        server.metrics_when("bpkv_running", 1)
        stopped = generate(server, "", stop=True, id="mine")
        assert stopped.last["finish_reason"] == "cancelled"
        with pytest.raises(Refused, match="was cancelled, after [0-9]+ tokens"):
            running.result(60)
    with pytest.raises(Refused, match="No request runs under this id"):
        generate(server, "", stop=True, id="mine")


def test_a_request_over_grpc_is_stopped_by_its_request_id(server: TritonServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(infer_stream, server, request_id="over grpc", **ENDLESS)
        server.metrics_when("bpkv_running", 1)
        infer_stream(server, "", "over grpc", stop=True)
        with pytest.raises(Refused, match="was cancelled"):
            running.result(60)


def test_a_request_ends_when_its_time_is_over(server: TritonServer) -> None:
    for client, status in ((generate, 400), (generate_stream, 200), (infer_stream, None)):
        with pytest.raises(Refused, match="took longer than its time limit") as refused:
            client(server, bpkv_timeout_s=0.4, **ENDLESS)
        assert refused.value.status == status


def test_a_full_queue_is_told_and_takes_requests_again(server: TritonServer) -> None:
    """Four run, four wait, and the ninth is refused; the eight get their answers."""
    before = server.metrics()[REFUSED]
    asked = {**ENDLESS, "sampling_param_max_tokens": 400}
    with ThreadPoolExecutor(8) as pool:
        eight = [pool.submit(generate, server, **asked) for _ in range(4)]
        server.metrics_when("bpkv_running", 4)
        eight += [pool.submit(generate, server, **asked) for _ in range(4)]
        server.metrics_when("bpkv_queue_length", 4)
        with pytest.raises(Refused, match="ask again later") as refused:
            infer_stream(server, TEXT)
        assert is_clean(refused.value.message)
        answers = [each.result(120).text for each in eight]
    assert set(answers) == {alone(ENDLESS["text"], "0.5", 400, "snapkv")[0]}
    assert server.metrics()[REFUSED] == before + 1


OUTCOMES: dict[str, tuple[dict[str, Any], str]] = {  # what is asked, and what it is counted as
    "whole": ({"text": TEXT, "sampling_param_max_tokens": 2}, "length"),
    "ended by its stop string": ({"text": TEXT, "sampling_param_stop": [" ", "s", "a", "e", "i"]}, "stop"),
    "out of time": ({**ENDLESS, "bpkv_timeout_s": 0.3}, "timeout"),
    "of an unknown input": ({"text": TEXT, "bpkv_buget": "0.2"}, "refused"),
    "past the server's limits": ({"text": TEXT, "sampling_param_max_tokens": 1601}, "refused"),
    "of a value that none can have": ({"text": TEXT, "sampling_param_stop": [""]}, "refused"),
    "of nothing": ({"text": ""}, "refused"),
    "of no options": ({"text": TEXT, "bpkv_policy": "best"}, "refused"),
    "with a budget below what is protected": ({"text": TEXT, "bpkv_budget": "3t"}, "refused"),
    "longer than the model knows": ({"text": "the snow is bright. " * 500}, "refused"),
    "certain to be longer": ({"text": "the snow is bright. " * 2000}, "refused"),
}


def outcomes(server: TritonServer) -> Counter[str]:
    """All that were counted until now: what the second publication from now on tells, since one may be under way."""
    after, end = time.time(), time.monotonic() + 20
    for _ in range(2):
        while (found := server.metrics())["bpkv_heartbeat_seconds"] <= after:
            assert time.monotonic() < end, "nothing is published"
            time.sleep(0.02)
        after = found["bpkv_heartbeat_seconds"]
    return Counter({name.split('"')[1]: int(found[name]) for name in found if "outcome=" in name})


def test_every_request_has_one_outcome_and_what_stops_another_has_none(server: TritonServer) -> None:
    before, sent = outcomes(server), Counter[str]()
    for client in (generate, generate_stream, infer_stream):
        for inputs, outcome in OUTCOMES.values():
            if client is not infer_stream or "bpkv_buget" not in inputs:  # which gRPC refuses itself
                sent[outcome] += 1
                with suppress(Refused):
                    client(server, **inputs)
    assert outcomes(server) - before == sent
    with ThreadPoolExecutor(5) as pool:  # the pool holds one of them
        five = [pool.submit(generate, server, id="number 0", **ENDLESS)]
        server.metrics_when("bpkv_running", 1)
        five += [pool.submit(generate, server, id=f"number {number}", **ENDLESS) for number in range(1, 5)]
        server.metrics_when("bpkv_queue_length", 4)
        with pytest.raises(Refused, match="as many as may"):
            generate(server, TEXT)
        for number in range(5):
            generate(server, "", stop=True, id=f"number {number}")
            with pytest.raises(Refused, match="was cancelled"):
                five[number].result(60)
    with pytest.raises(Refused, match="No request runs"):
        generate(server, "", stop=True, id="nobody's")
    sent.update({"cancelled": 5, "refused": 1})
    assert outcomes(server) - before == sent


def test_a_crowd_with_faults_in_it_gets_right_answers_or_reasons(server: TritonServer) -> None:
    """Short requests of every kind, some of them ended by their clients: soak.py runs any number of them."""
    done = soak(server, range(300), clients=8, seed=0)
    assert sum(done.values()) == 300 and done["wrong"] == 0 and done["failed"] == 0
    assert min(done["right"], done["left"], done["refused"]) > 20


def test_the_log_has_no_failure_of_ours(server: TritonServer) -> None:
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log and str(TINY) not in log.partition("READY")[2]
