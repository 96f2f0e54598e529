"""`bpkv profile` of a server under load, end to end on a trained model."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bpkv_trt.cli import main
from bpkv_trt.runtime.serving_loop import ServingLoop
from bpkv_trt.runtime.torch_host import TorchHost

ROOT = Path(__file__).resolve().parents[2]
PROMPT, ANSWER, REQUESTS, FITTING, REPEATS = 120, 24, 12, 3, 2
HEADS, ROW_BYTES, PAGE = 4 * 2, 2 * 32 * 4, 8  # of all layers; keys and values
WHOLE = HEADS * (PROMPT + ANSWER) * ROW_BYTES  # bytes of one request of which nothing is evicted; whole pages
BUDGETS = {"1": 1.0, "0.2": 0.2}
CONTENT: dict[str, Any] = {
    "model": str(ROOT / "tests" / "assets" / "tiny-llama"), "prompt_tokens": PROMPT, "answer_tokens": ANSWER,
    "budgets": list(BUDGETS), "repeats": REPEATS, "nsys": {"trace": ["nvtx"]},
    "serving": {"requests": REQUESTS, "pool_prompts": FITTING, "chunk_tokens": 64},
    "options": {"policy": "snapkv", "regime": "prefill", "page_size": PAGE, "positions": 8, "recent": 8},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")  # without nsys


def profile(tmp_path: Path, **changed: Any) -> str:
    path = tmp_path / "load.yaml"
    path.write_text(yaml.safe_dump(CONTENT | changed))
    return str(path)


def loaded(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def refusal(capsys: pytest.CaptureFixture[str], path: str) -> str:
    assert main(["profile", "run", path]) == 2
    told = capsys.readouterr().err
    assert told.startswith("bpkv: ") and told.count("\n") == 1 and not Path("profile-load").exists()
    return told


def test_a_session_of_loads_leaves_a_folder_whose_numbers_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "run", profile(tmp_path)]) == 0
    printed, folder = capsys.readouterr().out, tmp_path / "profile-load"
    runs, report = loaded(folder / "runs.json")["runs"], loaded(folder / "report.json")
    assert [(run["budget"], run["repeat"]) for run in runs] == [(b, r) for r in range(REPEATS) for b in BUDGETS]
    for run in runs:
        kept = int(BUDGETS[run["budget"]] * PROMPT) * HEADS
        assert (run["requests"], run["prompt_tokens"], run["answer_tokens"]) == (
            REQUESTS, REQUESTS * PROMPT, REQUESTS * ANSWER
        )  # fmt: skip
        assert run["entries_before"] == REQUESTS * HEADS * PROMPT and run["entries_after"] == REQUESTS * kept
        assert len(run["first_token_s"]) == len(run["token_s"]) == REQUESTS
        assert run["tokens_per_s"] == pytest.approx(REQUESTS * ANSWER / run["load_s"])
        assert 0 < max(run["first_token_s"]) < run["load_s"] and (ANSWER - 1) * max(run["token_s"]) < run["load_s"]
        assert WHOLE < run["bytes_peak"] <= run["bytes_pool"] == runs[0]["bytes_pool"]
        if run["budget"] == "1":
            assert run["most_running"] == FITTING
        else:
            assert FITTING < run["most_running"] <= run["bytes_pool"] // (kept * ROW_BYTES)
    assert FITTING * WHOLE <= runs[0]["bytes_pool"] < (FITTING + 1) * WHOLE

    ranges = {row["range"]: row for row in report["ranges"]}
    loads, evictions = REPEATS * len(BUDGETS), REPEATS * REQUESTS
    assert ranges["prefill"]["payload"] == loads * REQUESTS * PROMPT, "warm-ups are not in the trace"
    assert ranges["compact"]["count"] == ranges["score"]["count"] == evictions
    assert ranges["compact"]["payload"] == evictions * (PROMPT - int(0.2 * PROMPT)) * HEADS
    assert report["memory"] == {"peak_bytes": max(run["bytes_peak"] for run in runs), "last_bytes": 0}
    assert report["measured"] == "loads"
    for row, share in zip(report["budgets"], BUDGETS.values(), strict=True):
        own = [run for run in runs if run["budget"] == row["budget"]]
        assert row["entries_fraction"] == share and row["runs"] == REPEATS
        assert row["tokens_per_s"] == statistics.median(run["tokens_per_s"] for run in own)
        for key in ("first_token", "token"):
            times = np.array([run[f"{key}_s"] for run in own])
            assert row[f"{key}_p50_s"] == pytest.approx(np.median(times))
            assert np.median(times) <= row[f"{key}_p99_s"] <= times.max()
        assert (row["compaction_s"] == 0) == (share == 1)
        for key, ratio in row["over_full"].items():
            assert ratio == pytest.approx(row[key] / report["budgets"][0][key])
        assert {"most_running", "tokens_per_s", "first_token_p50_s", "token_p99_s"} <= row["over_full"].keys()
    assert (folder / "report.txt").read_text() in printed + "\n" and "at-once" in printed

    out = tmp_path / "again.json"
    assert main(["profile", "report", str(folder), "--json", str(out), "--plot", str(tmp_path / "pictures")]) == 0
    assert loaded(out) == report
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"load_against_budget.png", "timeline.png"}


def test_prompts_of_unequal_lengths_come_one_after_another(tmp_path: Path) -> None:
    """From 60 to 120 tokens by steps of 5, into a pool of given bytes; answers of one token have none in between."""
    serving = {"requests": 13, "shortest_prompt": 60, "pool_size": "1MiB", "every_s": 0.01, "most_running": 2}
    assert main(["profile", "run", profile(tmp_path, serving=serving, answer_tokens=1, repeats=1, warmup=0)]) == 0
    runs, report = (loaded(tmp_path / "profile-load" / f"{name}.json") for name in ("runs", "report"))
    for run in runs["runs"]:
        assert run["prompt_tokens"] == sum(range(60, 121, 5)) and run["answer_tokens"] == 13
        assert run["bytes_pool"] == 1 << 20 and 1 <= run["most_running"] <= 2
        assert run["load_s"] >= 0.12 and run["token_s"] == []
    assert [row["token_p50_s"] for row in report["budgets"]] == [None, None]
    assert "token_p50_s" not in report["budgets"][1]["over_full"]


def test_what_cannot_be_served_is_refused_before_anything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def served(*_: object) -> None:
        raise AssertionError("a request was served")

    monkeypatch.setattr(ServingLoop, "submit", served)
    small = {"requests": 4, "pool_size": f"{HEADS * PROMPT * (ROW_BYTES + 4) // 1024 + 8}KiB"}
    assert "pages" in refusal(capsys, profile(tmp_path, serving=small, budgets=[0.2, 1])), "the second budget's"
    assert "more than what is free" in refusal(capsys, profile(tmp_path, serving=small | {"pool_size": "900000GiB"}))
    many = {"requests": 10_000, "pool_prompts": 2}
    assert "as prompt_file" in refusal(capsys, profile(tmp_path, serving=many))
    assert "positions" in refusal(capsys, profile(tmp_path, answer_tokens=9000))
    few = {"budgets": [1, "4t"]}
    assert "protected" in refusal(capsys, profile(tmp_path, **few))


def test_a_load_of_which_a_request_fails_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, calls = TorchHost.forward, []

    def fails_once(self: TorchHost, chunks: Any, **options: Any) -> Any:
        calls.append(chunks)
        if len(calls) == 30:
            raise RuntimeError("a device that failed")
        return forward(self, chunks, **options)

    monkeypatch.setattr(TorchHost, "forward", fails_once)
    told = refusal(capsys, profile(tmp_path, warmup=0))
    assert "ended by 'error'" in told and "RuntimeError" in told
