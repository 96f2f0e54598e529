"""`bpkv generate` end to end on a trained model: its report, and what is refused once a model is known."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bpkv_trt.cli import main
from build_scripts.recall_text import recall_prompt

LLAMA = Path(__file__).parents[1] / "assets" / "tiny-llama"
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 32


def generate(tmp_path: Path, text: str, *options: str, model: Path = LLAMA) -> dict[str, Any]:
    prompt, out = tmp_path / "prompt.txt", tmp_path / "out.json"
    prompt.write_text(text, encoding="utf-8")
    arguments = ["generate", "--model", str(model), "--prompt-file", str(prompt), "--raw", "--json", str(out)]
    assert main([*arguments, "--max-new-tokens", "12", *options]) == 0
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, *options: str, model: Path = LLAMA) -> str:
    prompt, out = tmp_path / "prompt.txt", tmp_path / "out.json"
    prompt.write_text(text, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    arguments = ["generate", "--model", str(model), "--prompt-file", str(prompt), "--raw", "--json", str(out)]
    assert main([*arguments, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("bpkv: ") and printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    assert sorted(tmp_path.rglob("*")) == before
    return printed.err


@pytest.fixture
def long_text() -> str:
    return recall_prompt(11, 300)[0]


def test_the_report_has_every_key_and_its_numbers_add_up(tmp_path: Path, long_text: str) -> None:
    document = generate(tmp_path, long_text, "--budget", "0.2", "--page-size", "8", "--verify")
    prompt, pool, budget = document["prompt_tokens"], document["pool"], document["budget"]
    assert {"schema_version", "config", "versions", "machine", "text", "model"} <= document.keys()
    assert document["generated_tokens"] <= 12 and document["policy"] == "bpkv"
    assert document["regime"] == ["prefill", "generation"]
    assert (document["scope"], document["readout"]) == ("global", "direct")
    assert budget["requested"] == "0.2" and budget["clamped"] is False
    assert budget["entries_total"] == LAYERS * KV_HEADS * prompt
    assert budget["entries_kept"] == LAYERS * KV_HEADS * (prompt // 5)
    page = 2 * 8 * HEAD_DIM * 4
    assert pool["bytes_before"] == LAYERS * KV_HEADS * -(-prompt // 8) * page
    assert pool["bytes_before"] - pool["bytes_after"] == pool["pages_freed"] * page
    assert pool["bytes_after"] <= 0.2 * LAYERS * KV_HEADS * prompt * page / 8 + LAYERS * KV_HEADS * page
    (event,) = document["events"]
    assert event["regime"] == "prefill" and event["entries_after"] == budget["entries_kept"]
    assert 0 <= event["estimated_kl"] <= event["estimated_kl_stage1"] and 0 < event["covered_mass"] <= 1
    assert event["seconds"].keys() == {"readout", "score", "select", "compact"}
    assert document["timings_s"].keys() == {
        "load", "prefill", "readout", "score", "select", "compact", "decode", "verify",
    }  # fmt: skip
    assert document["verify"].keys() == {"future_kl_mean", "future_kl_max", "top1_agreement", "tokens"}
    assert 0 < document["verify"]["future_kl_mean"] <= document["verify"]["future_kl_max"]


def test_keeping_all_equals_full(tmp_path: Path, long_text: str) -> None:
    kept = generate(tmp_path, long_text, "--budget", "1.0", "--verify")
    full = generate(tmp_path, long_text, "--policy", "full", "--verify")
    assert kept["text"] == full["text"]
    assert kept["verify"] == full["verify"] == {**full["verify"], "future_kl_max": 0.0, "top1_agreement": 1.0}
    assert kept["budget"]["entries_kept"] == kept["budget"]["entries_total"] == full["budget"]["entries_total"]


def test_a_fraction_below_the_protected_entries_is_raised_and_reported(tmp_path: Path, long_text: str) -> None:
    document = generate(tmp_path, long_text, "--budget", "0.01")
    assert document["budget"]["clamped"] is True
    assert document["budget"]["entries_kept"] == LAYERS * KV_HEADS * 36
    assert "raised to the 36 protected" in document["events"][0]["note"]


def test_a_short_prompt_runs_in_full_and_says_so(tmp_path: Path) -> None:
    document = generate(tmp_path, "the code of lamp is amber.", "--budget", "0.2")
    assert document["budget"]["entries_kept"] == document["budget"]["entries_total"]
    assert "nothing is evicted" in document["events"][0]["note"]


def test_three_ways_to_say_a_budget_keep_the_same(tmp_path: Path, long_text: str) -> None:
    whole = generate(tmp_path, long_text, "--budget", "0.25")
    per_head = whole["prompt_tokens"] // 4
    size = LAYERS * KV_HEADS * per_head * 2 * HEAD_DIM * 4
    for same in (f"{per_head}t", f"{(size + 999) / 1000:.3f}kB"):
        assert (
            generate(tmp_path, long_text, "--budget", same)["budget"]["entries_kept"]
            == (whole["budget"]["entries_kept"])
        )


def test_a_question_after_is_asked_of_the_compacted_cache(tmp_path: Path, long_text: str) -> None:
    context, _, question = long_text.rpartition(" what ")
    document = generate(tmp_path, context, "--question-after", f"what {question}", "--budget", "0.3", "--verify")
    (event,) = document["events"]
    assert event["entries_before"] < LAYERS * KV_HEADS * document["prompt_tokens"]
    assert document["verify"]["tokens"] >= 1


def test_a_prompt_beyond_the_model_s_positions_is_refused_unless_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str
) -> None:
    text = " ".join([long_text] * 8)
    assert "--allow-extrapolation" in refused(capsys, tmp_path, text)
    document = generate(tmp_path, text, "--allow-extrapolation", "--budget", "0.1")
    assert document["prompt_tokens"] > 2048


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", "10t"), "protected"),
        (("--budget", "9kB"), "protected"),
        (("--scope", "everywhere"), "'head', 'layer' or 'global'"),
        (("--memory-limit", "1MiB"), "more than the limit given"),
        (("--regime", "prefill,deferred"), "choose one"),
        (("--max-new-tokens", "0"), "max_new_tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "nan"), "top_p"),
    ],
)
def test_what_a_model_cannot_have_is_refused_with_nothing_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str, options: tuple[str, ...], words: str
) -> None:
    assert words in refused(capsys, tmp_path, long_text, *options)


def test_nan_logits_are_told_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(LLAMA, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "NaN or Inf" in refused(capsys, tmp_path, long_text, model=broken)
