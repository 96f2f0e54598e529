"""`bpkv generate` end to end on a trained model: its report, and what is refused once a model is known."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bpkv_trt.cli import main
from bpkv_trt.runtime.event import CompactionEvent
from build_scripts.recall_text import recall_prompt
from tests.models.small_gguf import small_llama, write_gguf

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
    assert (document["scope"], document["readout"]) == ("global", "exact")
    assert budget["requested"] == "0.2" and budget["clamped"] is False
    assert budget["entries_total"] == LAYERS * KV_HEADS * prompt
    assert budget["entries_kept"] == LAYERS * KV_HEADS * (prompt // 5)
    page = 2 * 8 * HEAD_DIM * 4
    assert pool["bytes_before"] == LAYERS * KV_HEADS * -(-prompt // 8) * page
    assert pool["bytes_before"] - pool["bytes_after"] == pool["pages_freed"] * page
    assert pool["bytes_after"] <= 0.2 * LAYERS * KV_HEADS * prompt * page / 8 + LAYERS * KV_HEADS * page
    event, missed = document["events"]
    assert (missed["regime"], missed["entries_before"]) == ("generation", missed["entries_after"])
    assert event["regime"] == "prefill" and event["entries_after"] == budget["entries_kept"]
    assert 0 < event["drafted"] <= 32 + 2 * 16 and missed["drafted"] == 0
    assert 0 <= event["estimated_kl"] <= event["estimated_kl_stage1"] and 0 < event["covered_mass"] <= 1
    assert event.keys() == {each.name for each in fields(CompactionEvent)}
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
    event, _ = document["events"]  # the answer is shorter than an interval, which is reported as well
    assert event["entries_before"] < LAYERS * KV_HEADS * document["prompt_tokens"]
    assert document["verify"]["tokens"] >= 1


def test_a_question_after_needs_a_compaction_before_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str
) -> None:
    for regime in ("deferred", "generation"):
        assert "prefill" in refused(capsys, tmp_path, long_text, "--question-after", "what?", "--regime", regime)


def test_a_budget_of_the_prompt_needs_a_regime_that_compacts_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str
) -> None:
    message = refused(capsys, tmp_path, long_text, "--budget", "0.3", "--regime", "generation")
    assert "budget is 0.3" in message and "generation_budget" in message


def test_the_generation_regime_alone_reports_its_own_budget(tmp_path: Path, long_text: str) -> None:
    options = ("--regime", "generation", "--generation-budget", "34t", "--interval", "40", "--max-new-tokens", "90")
    document = generate(tmp_path, long_text, *options)
    last = [event for event in document["events"] if not event["note"]][-1]
    assert document["budget"]["requested"] == "34t"
    assert document["budget"]["entries_kept"] == last["entries_after"] < last["entries_before"]
    assert document["pool"]["pages_freed"] == last["pages_freed"]


def test_a_prompt_beyond_the_model_s_positions_is_refused_unless_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str
) -> None:
    text = " ".join([long_text] * 8)
    assert "--allow-extrapolation" in refused(capsys, tmp_path, text)
    document = generate(tmp_path, text, "--allow-extrapolation", "--budget", "0.1")
    assert document["prompt_tokens"] > 2048
    (note,) = document["notes"]
    assert "knows 2048" in note and note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", "10t"), "protected"),
        (("--budget", "9kB"), "protected"),
        (("--scope", "everywhere"), "'head', 'layer' or 'global'"),
        (("--memory-limit", "1MiB"), "use a narrower --dtype, or lower"),
        (("--memory-limit", "1MiB", "--verify"), "leave out --verify"),
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


def llama(directory: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(LLAMA, directory / "model"))


def unsupported(directory: Path) -> Path:
    model = llama(directory)
    config = json.loads((model / "config.json").read_text()) | {"model_type": "gpt_neox"}
    (model / "config.json").write_text(json.dumps(config))
    return model


def without_tokenizer(directory: Path) -> Path:
    model = llama(directory)
    for file in model.glob("tokenizer*"):
        file.unlink()
    return model


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x20
    file.write_bytes(content)


def truncated_weights(directory: Path) -> Path:
    model = llama(directory)
    truncated(model / "model.safetensors")
    return model


def flipped_header(directory: Path) -> Path:
    model = llama(directory)
    flipped(model / "model.safetensors", 20)
    return model


def ending_at(token: object) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        model = llama(directory)
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
        return model

    return make


def damaged_bin(directory: Path) -> Path:
    model = llama(directory)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Path("x")))
    return model


def truncated_gguf(directory: Path) -> Path:
    source = write_gguf(directory / "small.gguf", small_llama())
    truncated(source)
    return source


def corrupted_gguf(directory: Path) -> Path:
    source = write_gguf(directory / "small.gguf", small_llama())
    flipped(source, 22)
    return source


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unsupported, "gpt_neox"),
        (without_tokenizer, "without a tokenizer"),
        (truncated_weights, "weights"),
        (flipped_header, "weights"),
        (damaged_bin, "it is damaged, or holds more than weights"),
        *((ending_at(token), "eos_token_id") for token in ("x", ["x"], 1.5, True, -1, 10**6, [1, None, {}])),
        (truncated_gguf, "truncated, damaged"),
        (corrupted_gguf, "truncated, damaged"),
        (lambda directory: directory / "no" / "such" / "model", "no file or directory"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_paragraph(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    words: str,
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BPKV_CACHE_DIR", str(cache))
    assert words in refused(capsys, tmp_path, "A prompt.", model=make(tmp_path))
    assert not [left for left in cache.rglob("*") if left.is_file() and left.suffix != ".lock"]


def test_a_full_disk_does_not_lose_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str
) -> None:
    text = generate(tmp_path, long_text)["text"]
    capsys.readouterr()
    (tmp_path / "out.json").unlink()
    arguments = ["generate", "--model", str(LLAMA), "--prompt-file", str(tmp_path / "prompt.txt"), "--raw"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # less than the report, so writing it fails for real
    try:
        code = main([*arguments, "--max-new-tokens", "12", "--json", str(tmp_path / "out.json")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    printed = capsys.readouterr()
    assert code == 2 and printed.out.startswith(text)
    assert "out.json cannot be written (File too large)" in printed.err and printed.err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["prompt.txt"], "no half of a report is left"


def test_a_terminal_that_cannot_show_a_text_shows_the_rest(tmp_path: Path) -> None:
    """The prompt ends in bytes that the model goes on with, so the answer holds what ASCII lacks."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("\u00e9\u00e9 " * 60, encoding="utf-8")
    options = ["--prompt-file", str(prompt), "--raw", "--max-new-tokens", "12", "--temperature", "5", "--seed", "1"]
    options += ["--policy", "full"]  # what is drawn shall not hang on what is kept
    command = [sys.executable, "-m", "bpkv_trt", "generate", "--model", str(LLAMA), *options]
    environment = {**os.environ, "PYTHONPATH": str(LLAMA.parents[2]), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout.splitlines()[0] and "entries kept" in done.stdout


def test_a_trace_has_every_range_that_the_report_counts(tmp_path: Path, long_text: str) -> None:
    document = generate(tmp_path, long_text, "--trace", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert not [event for event in events if event["name"] == "verify"]
    for name, seconds in document["timings_s"].items():
        ranges = [event["dur"] for event in events if event["ph"] == "X" and event["name"] == name]
        assert sum(ranges) / 1e6 == pytest.approx(seconds, rel=1e-6), name
    sizes = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert document["pool"]["bytes_before"] in sizes and document["pool"]["bytes_after"] in sizes
    assert max(sizes) > document["pool"]["bytes_before"], "a draft takes room"


def test_a_refused_run_leaves_no_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path, long_text: str) -> None:
    trace, same = str(tmp_path / "trace.json"), str(tmp_path / "out.json")
    refused(capsys, tmp_path, long_text * 40, "--trace", trace)
    assert "different names" in refused(capsys, tmp_path, long_text, "--trace", same)
    assert "--trace would overwrite" in refused(capsys, tmp_path, long_text, "--trace", str(tmp_path / "prompt.txt"))
