"""The real server on a real model."""

import pydoc_data.topics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.alone import alone
from tests.serving.clients import generate, generate_stream, infer_stream
from tests.serving.conftest import Serve
from tests.serving.triton_server import TritonServer

TEXT = pydoc_data.topics.topics["with"]
TOKENS = 8
CASES = [(TEXT[:500], "0.5", "bpkv"), (TEXT[500:1700], "0.2", "snapkv"), ("What is a list?", "0.2", "snapkv")]


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[TritonServer]:
    with serve("--pool-size", "256MiB", model="smollm2") as started:
        yield started


@pytest.mark.slow
def test_answers_of_a_real_model_are_those_of_bpkv_generate(server: TritonServer) -> None:
    """Several at once, through its chat template, over every way."""
    clients = (generate, generate_stream, infer_stream)
    with ThreadPoolExecutor(len(CASES)) as pool:
        running = [
            pool.submit(client, server, text, bpkv_budget=budget, bpkv_policy=policy, sampling_param_max_tokens=TOKENS)
            for client, (text, budget, policy) in zip(clients, CASES, strict=True)
        ]
        answers = [each.result() for each in running]
    for (text, budget, policy), answered in zip(CASES, answers, strict=True):
        expected, kept, freed = alone(text, budget, TOKENS, policy, model="smollm2", raw=False)
        last = (answered.last["bpkv_entries_kept"], answered.last["bpkv_bytes_freed"])
        assert (answered.text, *last) == (expected, kept, freed)
    left = server.metrics_when("bpkv_running", 0)
    assert left["bpkv_pages_live"] == 0 and left["bpkv_bytes_freed_total"] > 0
