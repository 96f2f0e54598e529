"""The trace that the real server leaves, and what a profiler is told that is attached to its model."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from bpkv_trt.cli import main
from bpkv_trt.profiling import RangeName
from build_scripts.recall_text import recall_prompt, token_count
from tests.latency.stand_in_nvtx import build_stand_in, ranges_of
from tests.serving.clients import Answered, generate
from tests.serving.conftest import TINY, Serve
from tests.serving.triton_server import TritonServer

CHUNK, POOL, ROW_BYTES = 64, 8 << 20, 2 * 32 * 4 + 4  # a row's keys, values and position
ENTRIES = 4 * 2  # of a token: layers and KV heads


class Asked(NamedTuple):
    text: str
    budget: str
    tokens: int  # of the answer

    @property
    def prompt(self) -> int:
        return token_count(self.text) + 1  # BOS


ALONE = [Asked(recall_prompt(*size)[0], *how) for size, how in (((1, 300), ("0.3", 9)), ((2, 50), ("1", 5)))]
TOGETHER = [Asked(recall_prompt(3 + number, 100 + 40 * number)[0], "0.5", 12) for number in range(4)]


class Left(NamedTuple):
    """By a server that was asked all of these and then ended."""

    answers: list[Answered]
    trace: Path
    told: list[str]  # to the profiler

    @property
    def events(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = json.loads(self.trace.read_text())["traceEvents"]
        return content

    @property
    def ranges(self) -> list[tuple[str, int | None]]:
        return [(event["name"], event["args"].get("payload")) for event in self.events if event["ph"] == "X"]

    def payloads(self, name: str) -> list[int | None]:
        return [payload for each, payload in self.ranges if each == name]


@pytest.fixture(scope="module")
def left(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    folder = tmp_path_factory.mktemp("trace")
    trace, told = folder / "trace.json", folder / "told.txt"
    options = "--regime", "prefill", "--pool-size", "8MiB", "--chunk-tokens", str(CHUNK), "--trace", str(trace)
    profiler = {"NVTX_INJECTION64_PATH": str(build_stand_in(folder)), "STAND_IN_NVTX_FILE": str(told)}
    with serve(*options, **profiler) as server:
        answers = [ask(server, asked) for asked in ALONE]
        with ThreadPoolExecutor(len(TOGETHER)) as pool:
            answers += pool.map(lambda asked: ask(server, asked), TOGETHER)
        server.metrics_when("bpkv_running", 0)
        assert not trace.exists(), "it is written when the model ends"
        assert server.stop() == 0
    yield Left(answers, trace, told.read_text().splitlines())


def ask(server: TritonServer, asked: Asked) -> Answered:
    options = {"bpkv_raw": True, "bpkv_budget": asked.budget, "sampling_param_max_tokens": asked.tokens}
    return generate(server, asked.text, **options)


def test_payloads_are_what_the_requests_caused(left: Left) -> None:
    assert {name for name, _ in left.ranges} == {*get_args(RangeName)} - {"verify"}
    totals = [answer.last["bpkv_entries_total"] for answer in left.answers]
    evicted = [answer.last["bpkv_entries_total"] - answer.last["bpkv_entries_kept"] for answer in left.answers]
    assert totals == [ENTRIES * asked.prompt for asked in ALONE + TOGETHER]
    assert left.payloads("load") == [None]
    assert sum(filter(None, left.payloads("prefill"))) == sum(asked.prompt for asked in ALONE + TOGETHER)
    assert [count > 0 for count in evicted] == [asked.budget != "1" for asked in ALONE + TOGETHER]
    scored = [total for total, count in zip(totals, evicted, strict=True) if count]
    for name, expected in (("score", scored), ("select", evicted), ("compact", evicted)):
        assert Counter(left.payloads(name)) == Counter(filter(None, expected)), name


def test_one_request_after_another_is_decoded_token_by_token(left: Left) -> None:
    ranges = [each for each in left.ranges if each[0] in ("prefill", "decode")]
    expected = list[tuple[str, int]]()
    for asked in ALONE:
        chunks = [min(CHUNK, asked.prompt - done) for done in range(0, asked.prompt, CHUNK)]
        expected += [("prefill", chunk) for chunk in chunks] + [("decode", 1)] * (asked.tokens - 1)
    assert ranges[: len(expected)] == expected
    together = [payload or 0 for name, payload in ranges[len(expected) :] if name == "decode"]
    assert max(together) > 1 and sum(together) <= sum(asked.tokens - 1 for asked in TOGETHER)


def test_the_cache_grows_within_the_pool_and_ends_empty(left: Left) -> None:
    sizes = [event["args"]["bytes"] for event in left.events if event["ph"] == "C"]
    assert sizes[-1] == 0
    assert ENTRIES * ALONE[0].prompt * (ROW_BYTES - 4) <= max(sizes) <= POOL
    threads = {(event["name"] == "load", event["tid"]) for event in left.events if event["ph"] == "X"}
    assert len(threads) == len({thread for _, thread in threads}) == 2, "loaded in one, run in another"


def test_a_profiler_is_told_the_same_ranges(left: Left) -> None:
    told = ranges_of(left.told)
    assert [(each.name, each.payload) for each in told] == left.ranges
    assert {each.parent for each in told} <= {None, "readout"}


def test_it_is_reported_on(left: Left, tmp_path: Path) -> None:
    assert main(["profile", "report", str(left.trace), "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["range"]: row["count"] for row in report["ranges"]} == Counter(name for name, _ in left.ranges)
    assert report["memory"]["last_bytes"] == 0


def test_a_file_of_somebody_else_keeps_the_server_from_starting(tritonserver: Path, tmp_path: Path) -> None:
    trace, models = tmp_path / "trace.json", tmp_path / "models"
    command = ["model-repository", "--output", str(models), "--model", str(TINY), "--pool-size", "16MiB"]
    assert main([*command, "--trace", str(trace)]) == 0
    trace.write_text("theirs")  # since then
    server = TritonServer(tritonserver, models, tmp_path / "log")
    assert server.process.wait(120) == 1 and trace.read_text() == "theirs"
    log = (tmp_path / "log").read_text(errors="replace")
    assert "is no document of bpkv, so it is left as it is" in log and "Traceback" not in log
