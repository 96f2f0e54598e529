"""The real server on a trained model: what clients get, alone and together, over every way that Triton has."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import AutoTokenizer

from bpkv_trt.runtime.serving_metrics import COUNTERS, GAUGES, HISTOGRAMS, OUTCOMES, REQUESTS
from build_scripts.recall_text import counting_prompt, passkey_prompt, recall_prompt, token_count
from tests.serving.alone import alone
from tests.serving.clients import Answered, Refused, generate, generate_stream, infer_stream
from tests.serving.conftest import TINY, Serve
from tests.serving.triton_server import TritonServer

Client = Callable[..., Answered]
CLIENTS = (generate, generate_stream, infer_stream)
TOKENS = 12
pytestmark = pytest.mark.usefixtures("every_page_comes_back")


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[TritonServer]:
    with serve("--budget", "0.5", "--pool-size", "64MiB", "--chunk-tokens", "64") as started:
        yield started


@pytest.mark.parametrize("client", CLIENTS)
def test_an_answer_is_that_of_bpkv_generate(server: TritonServer, client: Client) -> None:
    text = recall_prompt(11, 300)[0]
    expected, kept, freed = alone(text, "0.3", TOKENS)
    answered = client(
        server, text, bpkv_budget="0.3", bpkv_raw=True, sampling_param_max_tokens=TOKENS, return_finish_reason=True
    )
    assert answered.text == expected
    assert (answered.last["bpkv_entries_kept"], answered.last["bpkv_bytes_freed"]) == (kept, freed)
    assert answered.last["finish_reason"] == "length" and freed > 0
    tokens = (answered.last["bpkv_prompt_tokens"], answered.last["bpkv_generated_tokens"])
    assert tokens == (token_count(text) + 1, TOKENS), "with BOS"
    if client is not generate:
        assert len(answered.pieces) >= TOKENS, "a piece for every token, and the end"


def test_what_a_request_does_not_say_the_repository_says(server: TritonServer) -> None:
    text = recall_prompt(3, 200)[0]
    answered = generate(server, text)
    expected, kept, _ = alone(text, "0.5", 128, raw=False)
    assert answered.text == expected and answered.last["bpkv_entries_kept"] == kept
    assert "finish_reason" not in answered.last, "told where it is asked for"


def test_budgets_and_policies_are_those_of_each_request(server: TritonServer) -> None:
    text = recall_prompt(5, 400)[0]
    cases = [("0.2", "bpkv"), ("0.8", "bpkv"), ("0.2", "snapkv"), ("100t", "snapkv"), ("0.5", "full")]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(
            pool.map(
                lambda case: generate(
                    server,
                    text,
                    bpkv_raw=True,
                    bpkv_budget=case[0],
                    bpkv_policy=case[1],
                    sampling_param_max_tokens=TOKENS,
                ),
                cases,
            )
        )
    for (budget, policy), answered in zip(cases, answers, strict=True):
        expected, kept, _ = alone(text, budget, TOKENS, policy)
        assert (answered.text, answered.last["bpkv_entries_kept"]) == (expected, kept), (budget, policy)
    assert len({answered.last["bpkv_entries_kept"] for answered in answers}) >= 4


def test_the_prompt_is_left_alone_in_the_regime_generation(server: TritonServer) -> None:
    text = recall_prompt(5, 300)[0]
    answered = generate(server, text, bpkv_regime="generation", sampling_param_max_tokens=TOKENS)
    assert answered.last["bpkv_bytes_freed"] == 0
    with pytest.raises(Refused, match="budget"):
        generate(server, text, bpkv_regime="generation", bpkv_budget="0.2")


def test_sixteen_clients_get_what_each_would_get_alone(server: TritonServer) -> None:
    """Prompts and answers of unequal lengths, greedy and drawn, over all three ways at once."""
    rng = random.Random(4)
    cases: list[tuple[Client, str, dict[str, Any]]] = []
    for number in range(16):
        text = recall_prompt(100 + number, rng.randrange(30, 700))[0]
        options = {
            "bpkv_raw": True,
            "bpkv_policy": "snapkv",  # whose compaction draws nothing, so that the seed is the answer's alone
            "bpkv_budget": rng.choice(["0.2", "0.4", "1"]),
            "sampling_param_max_tokens": rng.randrange(1, 60),
            "sampling_param_temperature": rng.choice([0.0, 0.8]),
            "sampling_param_seed": number,
        }
        cases.append((CLIENTS[number % 3], text, options))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda case: case[0](server, case[1], **case[2]), cases))
    for (_, text, options), answered in zip(cases, answers, strict=True):
        expected, kept, _ = alone(
            text,
            options["bpkv_budget"],
            options["sampling_param_max_tokens"],
            "snapkv",
            options["sampling_param_temperature"],
            options["sampling_param_seed"],
        )
        assert (answered.text, answered.last["bpkv_entries_kept"]) == (expected, kept)


def test_no_request_reads_what_is_another_ones(server: TritonServer) -> None:
    """Every client counts from a number of its own, or has a pass key of its own, which the model reads correctly."""
    cases = [passkey_prompt(seed, 128) for seed in range(8)] + [counting_prompt(seed, 128) for seed in range(8)]
    assert len({answer for _, answer in cases[:8]}) == 8

    def ask(case: tuple[str, str]) -> str:
        count = token_count(case[1])
        return generate(server, case[0], bpkv_raw=True, bpkv_budget="0.9", sampling_param_max_tokens=count).text

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, cases))
    assert answers == [answer for _, answer in cases]


def test_a_string_that_ends_an_answer_is_no_part_of_it(server: TritonServer) -> None:
    text, answer = counting_prompt(0, 128)
    words = answer.split()
    asked = {"bpkv_raw": True, "sampling_param_stop": [words[3]], "return_finish_reason": True, "bpkv_budget": "0.9"}
    for client in (generate_stream, infer_stream):
        answered = client(server, text, **asked)
        assert answered.text.split() == words[:3] and answered.last["finish_reason"] == "stop"


def test_a_question_is_put_after_the_text(server: TritonServer) -> None:
    text = recall_prompt(3, 150)[0]
    context, question = text[:-40], text[-40:]
    together = generate(server, f"{context}\n\n{question}", sampling_param_max_tokens=TOKENS)
    apart = generate(server, context, bpkv_question=question, sampling_param_max_tokens=TOKENS)
    assert apart.text == together.text != generate(server, context, sampling_param_max_tokens=TOKENS).text


def messages(*said: tuple[str, str]) -> str:
    return json.dumps([{"role": role, "content": content} for role, content in said])


def test_a_conversation_goes_through_the_models_chat_template(server: TritonServer) -> None:
    """Of one turn it is the text; of several it is what transformers makes of them, in tokens too."""
    text = recall_prompt(3, 150)[0]
    asked = {"sampling_param_max_tokens": TOKENS, "return_finish_reason": True}
    alike = {client(server, None, bpkv_messages=messages(("user", text)), **asked).text for client in CLIENTS}
    assert alike == {generate(server, text, **asked).text}
    said = [("user", text), ("assistant", "it is red."), ("user", text[-40:])]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    turns = [{"role": role, "content": content} for role, content in said]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    answered = generate(server, None, bpkv_messages=messages(*said), **asked)
    raw = generate(server, rendered, bpkv_raw=True, **asked)  # whose own BOS is not doubled
    assert answered.last == raw.last and raw.text not in alike
    assert answered.last["bpkv_prompt_tokens"] == len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def test_metrics_count_what_was_asked_and_answered(server: TritonServer) -> None:
    before = server.metrics_when("bpkv_running", 0)
    text = recall_prompt(21, 300)[0]
    generate(server, text, bpkv_raw=True, bpkv_budget="0.3", sampling_param_max_tokens=TOKENS)
    with pytest.raises(Refused):
        generate(server, text, bpkv_budget="0")
    _, kept, freed = alone(text, "0.3", TOKENS)
    length = f'{REQUESTS}{{outcome="length"}}'
    after = server.metrics_when(length, before[length] + 1)
    after = server.metrics_when(f'{REQUESTS}{{outcome="refused"}}', before[f'{REQUESTS}{{outcome="refused"}}'] + 1)

    def new(name: str) -> float:
        return after[name] - before[name]

    prompt = token_count(text) + 1  # BOS
    assert new("bpkv_prompt_tokens_total") == prompt and new("bpkv_generated_tokens_total") == TOKENS
    assert new("bpkv_bytes_freed_total") == freed
    assert new("bpkv_entries_evicted_total") == 4 * 2 * prompt - kept, "4 layers, 2 KV heads"
    for name in HISTOGRAMS:
        assert new(f"{name}_count") == 1 and new(f"{name}_sum") > 0, name
    assert after["bpkv_pages_free"] > 0 and new("bpkv_heartbeat_seconds") > 0


def test_every_documented_family_is_there(server: TritonServer) -> None:
    found = {name.partition("{")[0] for name in server.metrics()}
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("count", "sum", "bucket")}
    assert found == {REQUESTS, "bpkv_heartbeat_seconds", *COUNTERS, *GAUGES, *parts}
    assert {f'{REQUESTS}{{outcome="{outcome}"}}' for outcome in OUTCOMES} <= server.metrics().keys()
