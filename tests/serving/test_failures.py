"""The real server where our own code fails, by faults that the tests write into the repository's model.py."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bpkv_trt.cli import main
from build_scripts.recall_text import induction_prompt, recall_prompt
from tests.serving.alone import alone
from tests.serving.clients import Answered, Refused, generate, generate_stream, infer_stream
from tests.serving.conftest import TINY
from tests.serving.triton_server import TritonServer

TEXT = recall_prompt(11, 300)[0]
ENDLESS: dict[str, Any] = {
    "text": induction_prompt(1, 60)[0],
    "bpkv_raw": True,
    "bpkv_policy": "snapkv",
    "sampling_param_max_tokens": 1500,
}
DIED = 70
FAILED = "INTERNAL: The server failed at this request"

Faulty = Callable[[str], TritonServer]

LOOP = """
from bpkv_trt.runtime.serving_batch import ServingBatch

honest = ServingBatch.step

def step(batch):
    assert not any(each.request.sampling.max_new_tokens == 77 for each in batch.waiting), "at /usr/lib/secret.py"
    return honest(batch)

ServingBatch.step = step
"""

ANSWERS = """
receive, is_lost, bring, failures = Answer.receive, Answer.is_lost, PublishedMetrics._bring, [0]

def receiving(answer, output):
    if answer.name == "its end" and output.finish_reason or answer.name == "a piece" and output.tokens == 3:
        raise RuntimeError("at /usr/lib/secret.py")
    return receive(answer, output)

def looking(answer):
    if answer.name == "the look" and not answer._failed:
        raise RuntimeError("at /usr/lib/secret.py")
    return is_lost(answer)

def bringing(published, metrics):
    failures[0] += 1
    if failures[0] % 2:
        raise RuntimeError("no metrics at this moment")
    return bring(published, metrics)

Answer.receive, Answer.is_lost, PublishedMetrics._bring = receiving, looking, bringing
"""


@pytest.fixture
def faulty(tritonserver: Path, tmp_path: Path) -> Faulty:
    """A server whose model ends with these lines."""

    def made(lines: str) -> TritonServer:
        folder = tmp_path / "models"
        options = ["--model", str(TINY), "--budget", "0.5", "--pool-size", "16MiB"]
        assert main(["model-repository", "--output", str(folder), *options]) == 0
        with (folder / "bpkv" / "1" / "model.py").open("a") as code:
            code.write(lines)
        return TritonServer(tritonserver, folder, tmp_path / "log")

    return made


def test_a_loop_that_fails_tells_its_clients_and_ends_the_server_to_be_started_again(faulty: Faulty) -> None:
    with faulty(LOOP) as server, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client, server, **ENDLESS) for client in (generate, generate_stream, infer_stream)]
        server.metrics_when("bpkv_running", 3)
        last = pool.submit(generate, server, TEXT, sampling_param_max_tokens=77)
        for each in (*running, last):
            with pytest.raises(
                Refused, match=r"INTERNAL: The server failed at this request \(AssertionError\)"
            ) as told:
                each.result(60)
            assert "secret" not in told.value.message
        assert server.process.wait(60) == DIED and not server.shared_memory()
        log = server.log.read_text(errors="replace")
        assert "the serving loop failed and ends" in log and "secret.py" in log, "the log says why"


def test_what_goes_wrong_with_one_answer_is_told_and_leaves_the_others(faulty: Faulty) -> None:
    """Its end, a piece of it, a look at its client; and metrics that at times cannot be published."""
    right = alone(TEXT, "0.5", 12, "snapkv")[0]

    def right_one() -> Answered:
        return generate(server, TEXT, bpkv_raw=True, bpkv_policy="snapkv", sampling_param_max_tokens=12)

    with faulty(ANSWERS) as server, ThreadPoolExecutor(4) as pool:
        other = pool.submit(generate, server, **{**ENDLESS, "sampling_param_max_tokens": 400})
        for client, name, asked in (
            (generate, "its end", {**ENDLESS, "sampling_param_max_tokens": 5}),
            (generate_stream, "a piece", ENDLESS),
            (generate, "the look", ENDLESS),
            (generate_stream, "the look", ENDLESS),
        ):
            with pytest.raises(Refused, match=FAILED) as told:
                client(server, **asked, id=name)
            assert "secret" not in told.value.message
            assert right_one().text == right
        assert other.result(60).text == alone(ENDLESS["text"], "0.5", 400, "snapkv")[0]
        left = server.metrics_when("bpkv_running", 0)
        assert left["bpkv_pages_live"] == 0 and left["bpkv_healthy"] == 1
        outcomes = {json.loads(name.split("=")[1][:-1]): left[name] for name in left if "outcome=" in name}
        assert outcomes["cancelled"] == 3 and sum(outcomes.values()) == 9, "they do not go on unseen"
        assert left["bpkv_time_to_first_token_seconds_count"] == 9
        assert server.stop() == 0
    log = server.log.read_text(errors="replace")
    assert "an answer failed" in log and "metrics cannot be published" in log
