"""`bpkv generate --engine-dir` end to end, over TensorRT-LLM's stand-in: the report of the same model on a CPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from bpkv_trt.cli import main
from bpkv_trt.generate_command import NOT_OF_ENGINES
from bpkv_trt.models.loading import load_model
from bpkv_trt.profiling import RangeName
from build_scripts.recall_text import recall_prompt
from tests.trtllm.build_place import ROOT
from tests.trtllm.runner_place import BUILT, LLAMA

TEXT, _ = recall_prompt(11, 250)
ON_A_CPU = ["--scope", "head", "--readout", "direct", "--lookahead", "0", "--rehearsal", "0"]
ON_A_CPU += [word for name, value in BUILT.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


def generate(prompt, *options):
    out = prompt.parent / "out.json"
    arguments = ["generate", "--prompt-file", prompt, "--max-new-tokens", "12", "--json", out, *options]
    assert main([*map(str, arguments)]) == 0
    return json.loads(out.read_text())


def on_engine(place, prompt, *options):
    return generate(prompt, "--engine-dir", place.folder, "--tokenizer", LLAMA, *options)


def refused(capsys, prompt, *options):
    before = sorted(prompt.parent.rglob("*"))
    assert main([*map(str, ["generate", "--prompt-file", prompt, "--json", prompt.parent / "out.json", *options])]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("bpkv: ") and printed.err.count("\n") == 1
    assert sorted(prompt.parent.rglob("*")) == before
    return printed.err


def keys(value):
    """Of a document, at every depth; of a list, those of its first."""
    if isinstance(value, dict):
        return {name: keys(each) for name, each in value.items()}
    return keys(value[0]) if isinstance(value, list) and value and isinstance(value[0], dict) else None


@pytest.mark.parametrize("raw", [("--raw",), ("--question", "what is the code of the last one?")], ids=["raw", "chat"])
def test_the_report_is_that_of_the_model_on_a_cpu(place, prompt, capsys, raw):
    model = generate(prompt, "--model", LLAMA, *ON_A_CPU, *raw)
    printed = capsys.readouterr().out
    engine = on_engine(place, prompt, *raw)
    assert keys(engine) == keys(model)
    assert engine["model"] == str(place.folder) and engine["config"] == model["config"]
    for same in (
        "text",
        "prompt_tokens",
        "generated_tokens",
        "policy",
        "regime",
        "scope",
        "readout",
        "budget",
        "notes",
    ):
        assert engine[same] == model[same], same
    assert engine["events"][0]["estimated_kl"] == pytest.approx(model["events"][0]["estimated_kl"], rel=1e-3)
    assert engine["budget"]["entries_kept"] < engine["budget"]["entries_total"]
    seconds = engine["timings_s"]
    assert all((seconds[name] > 0) == (name != "verify") for name in seconds), seconds
    shown = capsys.readouterr().out
    assert [line.partition(":")[0] for line in shown.splitlines()] == [
        line.partition(":")[0] for line in printed.splitlines()
    ]


def test_what_is_given_is_in_place_of_what_the_engine_was_built_with(place, prompt, tmp_path):
    config = tmp_path / "options.yaml"
    config.write_text("budget: 0.5\nrecent: 16\n")
    engine = on_engine(place, prompt, "--raw", "--config", config, "--budget", "0.4", "--positions", "3", "--seed", "5")
    assert engine["config"] | {"budget": "0.4", "recent": 16, "positions": 3, "seed": 5} == engine["config"]
    assert engine["config"]["sinks"] == BUILT["sinks"]
    model = generate(prompt, "--model", LLAMA, *ON_A_CPU, "--raw", "--budget", "0.4", "--recent", "16")
    assert engine["budget"] == model["budget"]


def test_an_answer_ends_where_the_model_ends_it(place, prompt, tmp_path, capsys):
    """At a token of the generation configuration beside the tokenizer, and at one of the tokenizer."""
    on_a_cpu = [*ON_A_CPU, "--raw"]
    free = generate(prompt, "--model", LLAMA, *on_a_cpu)
    model = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    ids = load_model(str(LLAMA)).tokenizer(free["text"], add_special_tokens=False)["input_ids"]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[2], 2]}))
    expected = generate(prompt, "--model", model, *on_a_cpu)
    assert 0 < expected["generated_tokens"] < free["generated_tokens"]
    got = on_engine(place, prompt, "--raw", "--tokenizer", model)
    assert (got["text"], got["generated_tokens"]) == (expected["text"], expected["generated_tokens"])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 479}))
    (prompt.parent / "out.json").unlink()
    capsys.readouterr()
    message = refused(capsys, prompt, "--engine-dir", place.folder, "--tokenizer", model)
    assert "eos_token_id 479, which is none of its tokens, 0 to 478" in message


def test_answers_are_drawn_by_the_seed(place, prompt):
    drawn = ["--raw", "--temperature", "5"]
    one, same, other = (on_engine(place, prompt, *drawn, "--seed", seed)["text"] for seed in (1, 1, 2))
    assert one == same != other


def test_a_tokenizer_alone_is_enough(place, prompt, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, folder)
    got = on_engine(place, prompt, "--raw", "--tokenizer", folder)
    assert got["text"] == on_engine(place, prompt, "--raw")["text"]


GIVEN = {
    "question_after": ["x"],
    "dtype": ["float16"],
    "device": ["cpu"],
    "memory_limit": ["1GiB"],
    "allow_extrapolation": [],
    "verify": [],
}


@pytest.mark.parametrize("name", NOT_OF_ENGINES)
def test_options_that_engines_cannot_have(place, prompt, capsys, name):
    flag = f"--{name.replace('_', '-')}"
    message = refused(capsys, prompt, "--engine-dir", place.folder, "--tokenizer", LLAMA, flag, *GIVEN[name])
    assert f"{flag} cannot be given with --engine-dir: {NOT_OF_ENGINES[name]}" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scope", "layer"], "scope is layer, which an engine cannot have"),
        (["--layer-table", "table.json"], "layer_table is table.json, which an engine cannot have"),
        (["--top-k", "9"], "top_k is 9, and the engine was built for 8"),
        (["--budget", "x"], "budget is 'x'"),
        (["--tokenizer", "no/such/tokenizer/here"], "There is no tokenizer at 'no/such/tokenizer/here'"),
        (["--tokenizer", "nobody"], "The tokenizer of 'nobody' cannot be loaded"),
        (["--tokenizer", " "], "--tokenizer is empty"),
        (["--tokenizer", "."], "'.' comes without a tokenizer"),
        (["--plugin-lib", "no.so"], "The plugin library no.so given by --plugin-lib does not exist"),
        (["--max-new-tokens", "2000"], "knows 2048 positions, and the engine has rotations for no more"),
        (["--max-new-tokens", "300"], "max_context_length + max_new_tokens is"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--engine-dir", "no/engine"], "no/engine/config.json does not exist; check the path given to --engine-dir"),
    ],
    ids=" ".join,
)
def test_what_an_engine_cannot_be_run_with(place, prompt, tmp_path, capsys, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    command = ["--engine-dir", place.folder, "--tokenizer", LLAMA, *options]
    assert words in refused(capsys, prompt, *command)


def test_a_prompt_longer_than_the_engine_takes(place, prompt, capsys):
    prompt.write_text(f"{TEXT} " * 2)
    message = refused(capsys, prompt, "--engine-dir", place.folder, "--tokenizer", LLAMA)
    assert "and the engine was built for at most 400. Nothing was run." in message


def test_the_report_overwrites_no_part_of_the_engine(place, prompt, capsys):
    for name in ("bpkv_config.json", "config.json"):
        path = place.folder / name
        before = path.read_bytes()
        for command in (["doctor"], ["generate", "--tokenizer", LLAMA, "--prompt-file", prompt]):
            assert main([*map(str, command), "--engine-dir", str(place.folder), "--json", str(path)]) == 2
            assert "is no document of bpkv, so it is left as it is" in capsys.readouterr().err
        assert path.read_bytes() == before


def test_which_options_go_together(place, prompt, capsys):
    assert "--tokenizer is not given, and an engine has none" in refused(capsys, prompt, "--engine-dir", place.folder)
    for flag, *value in (("--tokenizer", LLAMA), ("--plugin-lib", place.library), ("--bounded-cache",)):
        assert f"{flag} is for an engine: give --engine-dir" in refused(capsys, prompt, "--model", LLAMA, flag, *value)


def test_without_tensorrt_llm_it_is_told(place, prompt):
    """In a process of its own, where nothing stands in for it."""
    command = ["generate", "--engine-dir", place.folder, "--tokenizer", LLAMA, "--prompt-file", prompt]
    command += ["--plugin-lib", place.library]
    run = [sys.executable, "-c", "import sys; sys.modules['tensorrt_llm'] = None; from bpkv_trt.cli import main; "]
    run[-1] += "sys.exit(main())"
    done = subprocess.run([*run, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "bpkv: TensorRT-LLM is not installed, and engines are run by its session: install it beside" in done.stderr


def test_a_trace_has_every_range_of_the_session(place, prompt, tmp_path):
    """Under the names of the torch host and of a server."""
    engine = on_engine(place, prompt, "--raw", "--trace", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for name, seconds in engine["timings_s"].items():
        ranges = [event["dur"] for event in events if event["ph"] == "X" and event["name"] == name]
        assert sum(ranges) / 1e6 == pytest.approx(seconds, rel=1e-6), name
    assert {event["name"] for event in events if event["ph"] == "X"} == {*get_args(RangeName)} - {"verify"}
