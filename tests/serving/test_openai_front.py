"""OpenAI's own client asks the front of a real server: what it gets is what the server and `bpkv generate` answer."""

import json
import math
import os
import random
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError, OpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from bpkv_trt.cli import main
from bpkv_trt.openai_front.app import make_app
from bpkv_trt.openai_front.asked import ChatAsked, CompletionAsked
from bpkv_trt.openai_front.http_server import HttpServer
from build_scripts.recall_text import counting_prompt, induction_prompt, recall_prompt, token_count
from tests.serving.alone import alone
from tests.serving.clients import generate
from tests.serving.conftest import Serve
from tests.serving.front import Front
from tests.serving.triton_server import TritonServer

TEXT = recall_prompt(11, 300)[0]
TOKENS = 12
pytestmark = pytest.mark.usefixtures("every_page_comes_back")
CLIENTS, RUNNING, WAITING = 16, 4, 16  # as many may wait: those that arrive at once all do, until the loop looks
ENDLESS = {  # a request whose answer goes on until it is ended: for some seconds
    "model": "bpkv",
    "prompt": induction_prompt(1, 60)[0],
    "bpkv_policy": "snapkv",
    "max_tokens": 1500,
}
CANCELLED = 'bpkv_requests_total{outcome="cancelled"}'


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[TritonServer]:
    limits = ("--most-running", str(RUNNING), "--queue-limit", str(WAITING), "--most-new-tokens", "1600")
    with serve("--budget", "0.5", "--pool-size", "64MiB", *limits) as started:
        yield started


@pytest.fixture(scope="module")
def front(server: TritonServer) -> Iterator[Front]:
    with Front(server.grpc) as started:
        yield started


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[OpenAI]:
    with OpenAI(base_url=front.url, api_key="not looked at", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def http(front: Front) -> Iterator[httpx.Client]:
    """A client that writes its bodies itself."""
    with httpx.Client(base_url=front.url, headers={"Content-Type": "application/json"}, timeout=60) as made:
        yield made


def test_a_completion_is_the_answer_of_bpkv_generate(client: OpenAI) -> None:
    expected, kept, freed = alone(TEXT, "0.3", TOKENS)
    asked: dict[str, Any] = {"model": "bpkv", "prompt": TEXT, "max_tokens": TOKENS}
    asked["extra_body"] = {"bpkv_budget": "0.3"}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
    assert whole.usage is not None
    usage = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
    assert usage == (token_count(TEXT) + 1, TOKENS, token_count(TEXT) + 1 + TOKENS)
    extra = whole.model_extra
    assert extra is not None and (extra["bpkv_entries_kept"], extra["bpkv_bytes_freed"]) == (kept, freed)
    streamed = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    pieces = [part.choices[0].text for part in streamed if part.choices]
    assert "".join(pieces) == expected and len(pieces) >= TOKENS, "a piece for every token"
    reasons = [part.choices[0].finish_reason for part in streamed if part.choices]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert streamed[-1].usage == whole.usage and [part.usage for part in streamed[:-1]] == [None] * len(pieces)
    assert len({part.id for part in streamed}) == 1 != len({part.id for part in streamed} | {whole.id})
    assert streamed[-1].choices == []


def test_an_answer_goes_on_past_its_end_where_that_is_ignored(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "bpkv", "prompt": recall_prompt(3, 60)[0], "max_tokens": 40}
    ended = client.completions.create(**asked).choices[0]
    whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert ended.finish_reason == "stop" and whole.choices[0].finish_reason == "length"
    assert whole.choices[0].text.startswith(ended.text)
    assert whole.usage is not None and whole.usage.completion_tokens == 40


def test_a_chat_is_the_servers_answer_to_the_same_messages(server: TritonServer, client: OpenAI) -> None:
    expected, kept, _ = alone(TEXT, "0.5", TOKENS, raw=False)
    one: list[Any] = [{"role": "user", "content": TEXT}]
    several: list[Any] = [
        {"role": "developer", "content": "one two three."},
        {"role": "user", "content": [{"type": "text", "text": TEXT[:-40]}, {"type": "text", "text": TEXT[-40:]}]},
        {"role": "assistant", "content": "it is red."},
        {"role": "user", "content": TEXT[-40:]},
    ]
    plain = [("system", "one two three."), ("user", TEXT), ("assistant", "it is red."), ("user", TEXT[-40:])]
    said = json.dumps([{"role": role, "content": content} for role, content in plain])
    by_server = generate(server, None, bpkv_messages=said, sampling_param_max_tokens=TOKENS, return_finish_reason=True)
    for messages, text in ((one, expected), (several, by_server.text)):
        whole = client.chat.completions.create(model="bpkv", messages=messages, max_completion_tokens=TOKENS)
        assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", text)
        parts = list(client.chat.completions.create(model="bpkv", messages=messages, max_tokens=TOKENS, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        extra = whole.model_extra
        assert extra is not None and whole.usage is not None
        assert extra["bpkv_entries_kept"] == (kept if messages is one else by_server.last["bpkv_entries_kept"])
    assert whole.usage.prompt_tokens == by_server.last["bpkv_prompt_tokens"]
    assert whole.usage.completion_tokens == by_server.last["bpkv_generated_tokens"]
    assert whole.choices[0].finish_reason == by_server.last["finish_reason"]


def test_what_is_left_out_is_as_the_server_has_it(server: TritonServer, client: OpenAI) -> None:
    by_server = generate(server, TEXT, bpkv_raw=True)
    nothing: Any = {"best_of": 1, "echo": False, "n": 1, "presence_penalty": 0, "logprobs": None, "stream": False}
    for given in ({}, nothing | {"frequency_penalty": 0.0, "logit_bias": {}, "user": "me", "stop": [], "suffix": None}):
        whole = client.completions.create(model="bpkv", prompt=[TEXT], **given)
        assert whole.choices[0].text == by_server.text
        assert (whole.model_extra or {})["bpkv_entries_kept"] == by_server.last["bpkv_entries_kept"]


def test_sixteen_clients_get_what_each_would_get_alone(client: OpenAI) -> None:
    """Prompts and answers of unequal lengths, greedy and drawn, whole and streamed."""
    rng = random.Random(4)
    cases = [
        (
            recall_prompt(100 + number, rng.randrange(30, 700))[0],
            rng.choice(["0.2", "0.4", "1"]),
            rng.randrange(1, 60),
            rng.choice([0.0, 0.8]),
            number,
        )
        for number in range(CLIENTS)
    ]

    def ask(case: tuple[str, str, int, float, int]) -> str:
        text, budget, tokens, temperature, seed = case
        asked: dict[str, Any] = {"prompt": text, "max_tokens": tokens, "temperature": temperature, "seed": seed}
        asked["extra_body"] = {"bpkv_budget": budget, "bpkv_policy": "snapkv"}
        if seed % 2:
            return client.completions.create(model="bpkv", **asked).choices[0].text
        parts = client.completions.create(model="bpkv", stream=True, **asked)
        return "".join(part.choices[0].text for part in parts)

    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(ask, cases))
    for (text, budget, tokens, temperature, seed), answer in zip(cases, answers, strict=True):
        assert answer == alone(text, budget, tokens, "snapkv", temperature, seed)[0]


@pytest.mark.parametrize("several", [False, True])
def test_a_string_that_ends_an_answer_is_no_part_of_it(client: OpenAI, several: bool) -> None:
    text, answer = counting_prompt(0, 128)
    words = answer.split()
    stop = ["never said", words[3]] if several else words[3]
    whole = client.completions.create(model="bpkv", prompt=text, stop=stop, extra_body={"bpkv_budget": "0.9"})
    assert whole.choices[0].text.split() == words[:3] and whole.choices[0].finish_reason == "stop"


REFUSED: dict[str, tuple[str, dict[str, Any], str | None, str]] = {  # endpoint, fields, the one at fault, what is told
    "two answers": ("completions", {"n": 2}, "n", "n is 2: input should be 1"),
    "the best of several": ("completions", {"best_of": 3}, "best_of", "best_of is 3"),
    "the prompt again": ("completions", {"echo": True}, "echo", "echo is True"),
    "probabilities": ("completions", {"logprobs": 0}, "logprobs", "cannot be honoured"),
    "probabilities of a chat": ("chat/completions", {"logprobs": True}, "logprobs", "logprobs is True"),
    "a penalty": (
        "completions",
        {"presence_penalty": 0.5},
        "presence_penalty",
        "presence_penalty is 0.5: input should be 0",
    ),
    "biased tokens": ("completions", {"logit_bias": {"50256": -100}}, "logit_bias", "logit_bias is"),
    "a tool": ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "tools is"),
    "JSON": ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
    "no name of a field": ("completions", {"\ud800" * 500: 1}, None, "unicode"),
    "a misspelt field": ("completions", {"bpkv_buget": "0.2"}, "bpkv_buget", "cannot be honoured"),
    "two prompts": ("completions", {"prompt": ["a", "b"]}, "prompt", "prompt is ['a', 'b']: a request has one prompt"),
    "none of a list": ("completions", {"prompt": []}, "prompt", "prompt is []: a request has one prompt"),
    "tokens": ("completions", {"prompt": [1, 2]}, "prompt", "prompt is [1, 2]: token ids are not taken, send the text"),
    "one token": ("completions", {"prompt": [1]}, "prompt", "prompt is [1]: token ids are not taken, send the text"),
    "a list of tokens": ("completions", {"prompt": [[1, 2]]}, "prompt", "token ids are not taken, send the text"),
    "lists of tokens": ("completions", {"prompt": [[1], [2]]}, "prompt", "token ids are not taken, send the text"),
    "a number as prompt": ("completions", {"prompt": 1}, "prompt", "prompt is 1: input should be a valid string"),
    "no prompt": ("completions", {"prompt": None}, "prompt", "prompt is missing"),
    "half a surrogate pair": ("completions", {"prompt": "\ud800"}, "prompt", "half a surrogate pair at 0"),
    "a number as text": ("completions", {"max_tokens": "5"}, "max_tokens", "integer"),
    "a huge number": ("completions", {"max_tokens": 2**40}, "max_tokens", "max_tokens is"),
    **{
        f"{field} of {number}": ("completions", {field: number}, field, f"{field} is {number}: input should be")
        for field in ("temperature", "top_p", "bpkv_timeout_s")
        for number in (1e308, 1e39, -1e39, math.nan, math.inf, -math.inf)  # json.dumps writes NaN, and Python reads it
    },
    "a budget as number": ("completions", {"bpkv_budget": 0.2}, "bpkv_budget", 'write it in quotes: "0.2"'),
    "tokens as budget": ("chat/completions", {"bpkv_budget": 1}, "bpkv_budget", 'write it in quotes: "1"'),
    "a negative seed": ("completions", {"seed": -1}, "seed", "seed is -1"),
    "two limits": ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, None, "give one of them"),
    "a picture": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
        None,
        "messages.0.content",
    ),
    "a tool's words": ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, None, "messages.0.role"),
    # and what the server says
    "no messages": ("chat/completions", {"messages": []}, None, "messages cannot be used"),
    "blank": ("chat/completions", {"messages": [{"role": "user", "content": " "}]}, None, "is empty"),
    "no text": ("completions", {"prompt": ""}, None, "is empty"),
    "no tokens": ("completions", {"max_tokens": 0}, None, "max_tokens is 0; this server gives 1 to 1600"),
    "a budget above 1": ("completions", {"bpkv_budget": "1.5"}, None, "a fraction above 1"),
    "no policy": ("completions", {"bpkv_policy": "best"}, None, "choose from"),
    "Triton's words": ("completions", {"bpkv_policy": "Server not ready"}, None, "choose from"),
    "no regime": ("completions", {"bpkv_regime": "sometimes"}, None, "not a regime"),
    "top_p of a greedy answer": ("completions", {"top_p": 0.5}, None, "would change nothing"),
    "no time": ("completions", {"bpkv_timeout_s": 0}, None, "more than 0"),
}
PROMPTS = {"completions": {"prompt": TEXT}, "chat/completions": {"messages": [{"role": "user", "content": TEXT}]}}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_in_openais_words(http: httpx.Client, name: str, stream: bool) -> None:
    endpoint, fields, param, why = REFUSED[name]
    body = json.dumps({"model": "bpkv", "stream": stream, **PROMPTS[endpoint], **fields})
    refused = http.post(endpoint, content=body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and why in error["message"], error
    assert param is None or error["param"] == param
    assert "\n" not in error["message"] and len(error["message"]) < 1000
    assert not any(of_server in error["message"] for of_server in ("INVALID_ARG", "sampling_param", "bpkv_messages"))


HARMLESS_AS: dict[str, tuple[list[Any], list[Any]]] = {  # what may be given, and what only equals it in Python
    "user": (["", "me"], [0, False]),
    "n": ([1], [True, 1.0]),
    "best_of": ([1], [True, 1.0]),
    "echo": ([False], [0, 0.0]),
    "logprobs": ([False], [0, 0.0]),
    "presence_penalty": ([0, 0.0, -0.0], [False]),
    "frequency_penalty": ([0, 0.0, -0.0], [False]),
    "logit_bias": ([{}], [[], False]),
    "tools": ([[]], [{}, False]),
    "tool_choice": (["none", "auto"], [False, 0]),
    "response_format": ([{"type": "text"}], ["text", {}, False]),
}


@pytest.mark.parametrize("endpoint, kind", [("completions", CompletionAsked), ("chat/completions", ChatAsked)])
def test_what_changes_nothing_takes_its_own_type_alone(
    http: httpx.Client, endpoint: str, kind: type[CompletionAsked] | type[ChatAsked]
) -> None:
    for name in HARMLESS_AS.keys() & kind.model_fields.keys():
        for values, status in zip(HARMLESS_AS[name], (200, 400), strict=True):
            for value in values:
                answered = http.post(
                    endpoint, json={"model": "bpkv", "max_tokens": 1, **PROMPTS[endpoint], name: value}
                )
                assert answered.status_code == status, (name, value, answered.text)
                assert status == 200 or answered.json()["error"]["param"].startswith(name)


HONOURED = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
}
HARMLESS = {"stream_options", "user"}  # what they are given below is what they may be


@pytest.mark.parametrize("endpoint, params", [("completions", CompletionParams), ("chat/completions", ChatParams)])
def test_no_field_of_openais_is_ignored_in_silence(http: httpx.Client, endpoint: str, params: Any) -> None:
    fields = params.__annotations__.keys() - HONOURED
    assert {"n", "logit_bias"} <= fields
    for name in fields:
        refused = http.post(endpoint, json={"model": "bpkv", **PROMPTS[endpoint], name: {"any": "thing"}})
        assert refused.status_code == 400 and name in refused.json()["error"]["message"], name


def test_errors_are_what_openais_client_makes_of_them(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as bad:
        client.completions.create(model="bpkv", prompt=TEXT, n=2)
    assert bad.value.param == "n" and "n is 2" in bad.value.message
    with pytest.raises(NotFoundError) as missing:
        client.completions.create(model="gpt", prompt=TEXT)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(InternalServerError, match="took longer than its time limit") as late:
        client.completions.create(**ENDLESS_BY_SDK, extra_body={"bpkv_timeout_s": 0.4, "bpkv_policy": "snapkv"})
    assert (late.value.status_code, late.value.code, late.value.type) == (503, "unavailable", "server_error")
    with pytest.raises(APIError, match="took longer than its time limit"):  # after its first pieces
        begun = client.completions.create(
            **ENDLESS_BY_SDK, stream=True, extra_body={"bpkv_timeout_s": 1.0, "bpkv_policy": "snapkv"}
        )
        assert next(iter(begun)).choices[0].text
        list(begun)


ENDLESS_BY_SDK: Any = {name: value for name, value in ENDLESS.items() if name != "bpkv_policy"}


def test_other_places_and_other_bodies_are_refused_alike(http: httpx.Client) -> None:
    cases = [
        (http.get("completions"), 405),
        (http.post("embeddings", json={}), 404),
        *(
            (http.get(f"http://{http.base_url.netloc.decode()}/{page}"), 404)
            for page in ("docs", "redoc", "openapi.json")
        ),
        (http.post("completions", content=b"[1]"), 400),
        (http.post("completions", content=json.dumps(ENDLESS), headers={"Content-Type": "text/plain"}), 400),
        (http.post("completions", content=b" " * (65 << 20)), 413),
    ]
    assert "Content-Type: application/json" in cases[-2][0].json()["error"]["message"]
    for refused, status in cases:
        error = refused.json()["error"]
        assert refused.status_code == status and error["type"] == "invalid_request_error" and error["message"]
        assert "Traceback" not in refused.text and len(refused.text) < 1000


NO_JSON = {
    b"{": "The body is not JSON (Expecting property name enclosed in double quotes, at character 1); ",
    b'{"model": bpkv}': "The body is not JSON (Expecting value, at character 10); ",
    b'{"model": "bpkv"}}': "The body is not JSON (Extra data, at character 17); ",
    b'{"model": "\xff"}': "The body is not JSON (invalid start byte, at byte 11); ",
    b"\xff": "The body is not JSON (invalid start byte, at byte 0); ",
    b"[" * 100_000: "The body is not JSON (lists or objects are nested too deeply); ",
    b"[" * 100_000 + b"]" * 100_000: "The body is not JSON (lists or objects are nested too deeply); ",
    b'{"model": "bpkv", "seed": %s}' % (b"1" * 5000): "The body is not JSON (a number has too many digits); ",
    b"": "The body is missing; ",
}


@pytest.mark.parametrize("body", NO_JSON, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_no_json_is_told_where(http: httpx.Client, body: bytes) -> None:
    for endpoint in PROMPTS:
        refused = http.post(endpoint, content=body)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["message"].startswith(NO_JSON[body]), error
        assert (error["type"], error["param"]) == ("invalid_request_error", None)


def test_the_model_is_listed_and_the_server_is_looked_after(client: OpenAI, front: Front) -> None:
    assert [model.id for model in client.models.list()] == ["bpkv"]
    assert client.models.retrieve("bpkv").id == "bpkv"
    with pytest.raises(NotFoundError, match="no model 'of/others'"):
        client.models.retrieve("of/others")
    assert httpx.get(f"http://127.0.0.1:{front.port}/health").json() == {"status": "ok"}
    for path in ("health", "v1/models"):
        assert httpx.head(f"http://127.0.0.1:{front.port}/{path}").status_code == 200


def connected(front: Front, **asked: Any) -> socket.socket:
    """A client that has asked, and reads nothing yet."""
    body = json.dumps(asked).encode()
    client = socket.create_connection(("127.0.0.1", front.port), timeout=60)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: TritonServer, front: Front, stream: bool) -> None:
    before = server.metrics()[CANCELLED]
    with connected(front, **ENDLESS, stream=stream) as client:
        if stream:
            assert b"data: " in client.recv(65536) + client.recv(65536)
        assert server.metrics_when("bpkv_running", 1)["bpkv_pages_live"] > 0
    assert server.metrics_when(CANCELLED, before + 1)["bpkv_pages_live"] == 0


def test_a_full_queue_is_told_and_all_that_wait_may_leave(server: TritonServer, front: Front, client: OpenAI) -> None:
    before = server.metrics()[CANCELLED]
    with ExitStack() as clients:
        for number in range(RUNNING + WAITING):
            clients.enter_context(connected(front, **ENDLESS, stream=bool(number % 2)))
            server.metrics_when("bpkv_running", min(number + 1, RUNNING))
        server.metrics_when("bpkv_queue_length", WAITING)
        with pytest.raises(InternalServerError, match="ask again later") as refused:
            client.completions.create(model="bpkv", prompt=TEXT)
        assert refused.value.status_code == 503
    server.metrics_when(CANCELLED, before + RUNNING + WAITING)


def test_clients_that_leave_as_their_answers_end_do_not_keep_the_server(serve: Serve, tmp_path: Path) -> None:
    """Triton 2.51 may lose a request whose gRPC stream is cancelled then, and waits for it for ever at its end."""
    trace = tmp_path / "trace.json"
    options = "--pool-size", "16MiB", "--trace", str(trace)
    with serve(*options, BPKV_EXIT_TIMEOUT_S="8") as server, Front(server.grpc) as front:
        wait_s = {False: 0.02, True: 0.02}
        for number in range(400):
            stream = bool(number % 2)
            with connected(front, model="bpkv", prompt="one two three", max_tokens=1, stream=stream) as client:
                answered, _, _ = select.select([client], [], [], wait_s[stream])
            wait_s[stream] *= 0.97 if answered else 1.03  # to where half of them are just answered
        server.metrics_when("bpkv_running", 0)
        assert server.stop() == 0 and trace.exists()


def is_told_everywhere(front: Front, message: str) -> None:
    """By every endpoint, as 503."""
    with OpenAI(base_url=front.url, api_key="a", max_retries=0) as client:
        asks: list[Callable[[], object]] = [
            *(
                partial(client.completions.create, model=front.model, prompt=TEXT, stream=each)
                for each in (False, True)
            ),
            client.models.list,
            partial(client.models.retrieve, front.model),
        ]
        for ask in asks:
            with pytest.raises(InternalServerError, match=message) as refused:
                ask()
            assert refused.value.status_code == 503
    health = httpx.get(f"http://127.0.0.1:{front.port}/health")
    assert health.status_code == 503 and re.search(message, health.json()["error"]["message"])


def test_a_server_that_has_no_such_model_is_told(server: TritonServer) -> None:
    with Front(server.grpc, model="other") as front:
        is_told_everywhere(front, r"no model other that is ready: .*--model-name")


def test_a_server_that_ends_is_told_while_its_last_answer_comes(serve: Serve) -> None:
    limits = ("--pool-size", "16MiB", "--most-new-tokens", "1600")
    with serve(*limits) as server, Front(server.grpc) as front:
        with OpenAI(base_url=front.url, api_key="a", max_retries=0) as client:
            goes_on = {"bpkv_policy": "snapkv", "ignore_eos": True}
            begun = client.completions.create(**ENDLESS_BY_SDK, stream=True, extra_body=goes_on)
            assert next(iter(begun)).choices[0].text
            server.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 20
            while httpx.get(f"http://127.0.0.1:{front.port}/health").status_code == 200:
                assert time.monotonic() < end, "the signal does nothing"
            is_told_everywhere(front, "no model bpkv that is ready: .* ask again later")
            assert list(begun)[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_a_second_interrupt_ends_it_at_once(server: TritonServer, tmp_path: Path, first: signal.Signals) -> None:
    """As Python itself ends by one, without a word; what runs on the server ends with it."""
    with (tmp_path / "log").open("wb") as log, Front(server.grpc, log=log) as front, ExitStack() as clients:
        for stream in (False, True):
            clients.enter_context(connected(front, **ENDLESS, stream=stream))
        server.metrics_when("bpkv_running", 2)
        front.process.send_signal(first)
        while is_listening(front):  # until it has noticed
            pass
        assert front.process.poll() is None
        front.process.send_signal(signal.SIGINT)
        assert front.process.wait(20) == -signal.SIGINT  # 130 to a shell
    assert (tmp_path / "log").read_text() == ""


def is_listening(front: Front) -> bool:
    try:
        socket.create_connection(("127.0.0.1", front.port), timeout=60).close()
    except ConnectionError:
        return False
    return True


def test_an_answer_that_outlasts_the_fronts_end_is_told(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bpkv_trt.openai_front.http_server.EXIT_TIMEOUT_S", 0.1)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
    http_server = HttpServer(make_app(f"127.0.0.1:{server.grpc}", "bpkv"))
    with ThreadPoolExecutor(2) as pool, ExitStack() as at_last:
        at_last.callback(setattr, http_server, "should_exit", True)  # also where the test fails before
        serving = pool.submit(http_server.run, [listening])
        answer = pool.submit(httpx.post, url, json=ENDLESS, timeout=60)
        with httpx.stream("POST", url, json=ENDLESS | {"stream": True}, timeout=60) as begun:
            server.metrics_when("bpkv_running", 2)
            http_server.should_exit = True
            with pytest.raises(httpx.RemoteProtocolError):  # cut off
                begun.read()
        told = answer.result(60)
        serving.result(60)
    assert told.status_code == 503 and "The front is ending" in told.json()["error"]["message"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_server_that_was_gone_is_looked_for_all_the_time() -> None:
    """And not at longer and longer intervals, as gRPC would: a server that is started again is asked again."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with Front(port) as front, ThreadPoolExecutor(1) as pool:
        found = threading.Event()

        def look() -> None:
            while not found.is_set():
                assert httpx.get(f"http://127.0.0.1:{front.port}/health", timeout=60).status_code == 503

        looking = pool.submit(look)
        time.sleep(12)
        with socket.create_server(("127.0.0.1", port)) as back, ExitStack() as at_last:
            at_last.callback(found.set)
            back.settimeout(2.5)  # gRPC's own interval is above 3 seconds by now
            back.accept()[0].close()
        looking.result()


def test_a_server_that_is_not_there_is_told(tmp_path: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with Front(port) as front, OpenAI(base_url=front.url, api_key="a", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(InternalServerError, match="cannot be reached") as refused:
                client.completions.create(model="bpkv", prompt=TEXT, stream=stream)
            assert refused.value.status_code == 503
        health = httpx.get(f"http://127.0.0.1:{front.port}/health")
        assert health.status_code == 503 and "does not answer" in health.json()["error"]["message"]


def test_a_model_that_died_is_told(serve: Serve) -> None:
    with serve("--pool-size", "16MiB") as server, Front(server.grpc) as front:
        with OpenAI(base_url=front.url, api_key="a", max_retries=0) as client:
            os.kill(server.model_process(), signal.SIGKILL)
            with pytest.raises(InternalServerError, match="no model bpkv that is ready") as refused:
                client.completions.create(model="bpkv", prompt=TEXT)
            assert refused.value.status_code == 503


def test_a_server_that_dies_is_told(serve: Serve) -> None:
    with serve("--pool-size", "16MiB") as server, Front(server.grpc) as front:
        with OpenAI(base_url=front.url, api_key="a", max_retries=0) as client:
            begun = client.completions.create(**ENDLESS_BY_SDK, stream=True, extra_body={"bpkv_policy": "snapkv"})
            assert next(iter(begun)).choices[0].text
            os.kill(server.model_process(), signal.SIGKILL)
            with pytest.raises(APIError):
                list(begun)
            server.process.wait(60)
            with pytest.raises(InternalServerError, match="cannot be reached"):
                client.completions.create(model="bpkv", prompt=TEXT)


def test_where_it_cannot_listen_and_what_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, told in (
            (["--server", "localhost:8001", "--port", port], "cannot be listened on"),
            (["--server", "localhost:8001", "--port", "99999"], "is not a port"),
            (["--server", "localhost:8001", "--host", "nowhere.invalid"], "cannot be listened on"),
            (["--server", "[::1]:8001", "--port", port], "cannot be listened on"),
            (["--server", "localhost:8001", "--host", "a" * 70], "cannot be listened on"),
            (["--server", "localhost:8001", "--port", "1" * 5000], "is not a port"),
            (["--server", "http://localhost:8001"], "is not HOST:PORT"),
            (["--server", "local host:8001"], "is not HOST:PORT"),
            (["--server", " localhost:8001"], "is not HOST:PORT"),
            (["--server", "localhost:8001 "], "is not HOST:PORT"),
            (["--server", "::1:8001"], "is not HOST:PORT"),
            (["--server", "localhost:\N{ARABIC-INDIC DIGIT EIGHT}"], "is not HOST:PORT"),
            (["--server", "localhost:0"], "'0' is not a port, a number from 1 to 65535"),
            (["--server", "localhost:99999"], "'99999' is not a port"),
            *(
                (["--server", "localhost:8001", "--model-name", name], f"{name!r} is not the name of a model")
                for name in ("", " ", "two\nlines", "\udcff")
            ),
            ([], "--server"),
        ):
            assert main(["openai-front", *arguments]) == 2
            printed = capsys.readouterr()
            assert printed.out == "" and told in printed.err and printed.err.count("\n") == 1
