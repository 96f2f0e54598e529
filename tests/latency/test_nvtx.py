"""What a profiler that attaches itself to a process is told, by a library that plays one."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from build_scripts.recall_text import recall_prompt
from tests.latency.stand_in_nvtx import ROOT, Range, build_stand_in, ranges_of

LLAMA = ROOT / "tests" / "assets" / "tiny-llama"


class Run(NamedTuple):
    """A `bpkv generate` under the stand-in: what it reported, and what the profiler was told."""

    report: dict[str, Any]
    trace: dict[str, Any]
    ranges: list[Range]  # in order of their beginning
    told: list[str]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("nvtx"))


def run(stand_in: Path, folder: Path, *options: str, **environment: str) -> Run:
    text, told = folder / "prompt.txt", folder / "told.txt"
    text.write_text(recall_prompt(3, 300)[0])
    command = [sys.executable, "-m", "bpkv_trt", "generate", "--model", str(LLAMA), "--raw", "--prompt-file", str(text)]
    command += ["--json", str(folder / "out.json"), "--trace", str(folder / "trace.json"), *options]
    attached = {"NVTX_INJECTION64_PATH": str(stand_in), "STAND_IN_NVTX_FILE": str(told), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=os.environ | attached | environment, check=True, stdout=subprocess.DEVNULL)
    report, trace = (json.loads((folder / name).read_text()) for name in ("out.json", "trace.json"))
    lines = told.read_text().splitlines() if told.exists() else []
    return Run(report, trace, ranges_of(lines), lines)


@pytest.fixture(scope="module")
def compacted(stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = "--budget", "0.3", "--generation-budget", "40t", "--interval", "8", "--max-new-tokens", "20", "--verify"
    return run(stand_in, tmp_path_factory.mktemp("compacted"), *options)


def test_payloads_are_what_the_report_says(compacted: Run) -> None:
    report, before_verifying = compacted.report, list[Range]()
    for each in compacted.ranges:
        if each.name == "verify":
            break
        before_verifying.append(each)
    payloads = {name: [each.payload for each in before_verifying if each.name == name] for name in "load prefill score "
                "select compact decode".split()}  # fmt: skip
    events = [event for event in report["events"] if event["note"] is None]
    assert {event["regime"] for event in events} >= {"prefill"}
    evicted = [event["entries_before"] - event["entries_after"] for event in events]
    assert payloads["load"] == [None] and payloads["prefill"] == [report["prompt_tokens"]]
    assert payloads["compact"] == payloads["select"] == evicted
    assert payloads["score"][0] == events[0]["entries_before"], "a prompt is scored whole"
    assert len(payloads["score"]) == len(events)
    assert payloads["decode"] == [1] * (report["generated_tokens"] - 1), "the last token is drawn and not run"


def test_ranges_nest_as_the_work_does(compacted: Run) -> None:
    verifying = [each for each in compacted.ranges if each.name == "verify"]
    assert len(verifying) == 1
    inside = Counter(each.name for each in compacted.ranges if each.parent == "verify")
    assert inside["compact"] >= 1 and inside["score"] == inside["compact"], "verifying compacts once more"
    assert {each.parent for each in compacted.ranges} <= {None, "verify", "readout"}


def test_the_trace_in_process_has_the_same_ranges(compacted: Run) -> None:
    events = [event for event in compacted.trace["traceEvents"] if event["ph"] == "X"]
    traced = [(event["name"], event["args"].get("payload")) for event in events]
    assert traced == [(each.name, each.payload) for each in compacted.ranges]


def test_nothing_is_told_where_ranges_are_disabled(stand_in: Path, tmp_path: Path) -> None:
    quiet = run(stand_in, tmp_path, "--max-new-tokens", "4", NVTX_DISABLE="1")
    assert quiet.ranges == [] and not [line for line in quiet.told if "push" in line]
    assert any(event["ph"] == "X" for event in quiet.trace["traceEvents"]), "the trace goes on"
