"""`bpkv model-repository --engine-dir`: what it writes and refuses, and the real server on it, without a GPU."""

import shutil
from pathlib import Path

import pytest

from bpkv_trt.cli import main
from bpkv_trt.errors import ConfigError
from bpkv_trt.model_repository_command import NOT_OF_ENGINES
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine_batch import EngineBatch
from bpkv_trt.runtime.serving_host import open_batch
from bpkv_trt.serving_settings import ServingSettings
from tests.serving.triton_server import TritonServer
from tests.trtllm.build_place import save_library
from tests.trtllm.runner_place import BUILT, LLAMA, RunnerPlace


@pytest.fixture(scope="module")
def place(trt, tensorrt_10, tmp_path_factory):
    return RunnerPlace(trt, tensorrt_10, tmp_path_factory.mktemp("runner"))


def write(out, *options):
    return main([*map(str, ["model-repository", "--output", out, *options])])


def refused(capsys, out, *options):
    assert write(out, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("bpkv: ") and printed.err.count("\n") == 1
    assert not out.exists()
    return printed.err


def test_what_is_written_is_what_a_server_opens(place, tmp_path, monkeypatch):
    """By relative paths, beside an option of a file."""
    monkeypatch.chdir(place.folder.parent)
    shutil.copytree(LLAMA, tmp_path / "own" / "tokenizer")
    config = tmp_path / "options.yaml"
    config.write_text("budget: 0.4\nrecent: 6\n")  # fewer than BpkvConfig's own positions, and not than the engine's
    options = ["--engine-dir", "engine", "--tokenizer", LLAMA, "--plugin-lib", place.library, "--bounded-cache"]
    options += ["--config", config, "--interval", "9", "--most-running", "2", "--queue-limit", "7"]
    assert write(tmp_path / "models", *options) == 0
    settings = ServingSettings.read(tmp_path / "models" / "bpkv" / "1" / "model.yaml")
    assert settings == ServingSettings(
        engine=str(place.folder),
        tokenizer=str(LLAMA),
        plugin_lib=str(place.library),
        bounded_cache=True,
        options={"budget": 0.4, "recent": 6, "interval": "9"},
        most_running=2,
        queue_limit=7,
    )
    monkeypatch.chdir(tmp_path)
    with place.installed():
        batch, _ = open_batch(settings, Trace())
    assert isinstance(batch, EngineBatch)
    config = batch._runner.config
    assert (str(config.budget), config.recent, config.interval) == ("0.4", 6, 9)
    assert (config.sinks, config.positions) == (BUILT["sinks"], BUILT["positions"])


GIVEN = {"dtype": "float16", "device": "cpu", "pool_size": "1GiB", "chunk_tokens": "64"}


@pytest.mark.parametrize("name", NOT_OF_ENGINES)
def test_options_that_would_change_nothing(place, tmp_path, capsys, name):
    flag = f"--{name.replace('_', '-')}"
    engine = ["--engine-dir", place.folder, "--tokenizer", LLAMA]
    message = refused(capsys, tmp_path / "models", *engine, flag, GIVEN[name])
    assert f"{flag} cannot be given with --engine-dir: {NOT_OF_ENGINES[name]}" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine-dir", "."], "config.json does not exist"),
        (["--tokenizer", "no/tokenizer/here"], "There is no tokenizer at"),
        (["--tokenizer", " "], "--tokenizer is empty"),
        (["--plugin-lib", "no.so"], "The plugin library no.so given by --plugin-lib does not exist"),
        (["--scope", "global"], "scope is global, which an engine cannot have"),
        (["--policy", "snapkv"], "policy is snapkv, which an engine cannot have"),
        (["--layer-table", "t.json"], "layer_table is t.json, which an engine cannot have"),
        (["--positions", "5"], "positions is 5, and the engine was built for at most 4"),
        (["--regime", "prefill", "--interval", "9"], "interval is 9, which changes nothing here"),
        (["--budget", "x"], "budget is 'x'"),
        (["--most-running", "0"], "most_running is 0"),
        (["--model", LLAMA], "Both are given"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40],
)
def test_what_no_server_could_serve_is_refused_now(place, tmp_path, capsys, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    engine = ["--engine-dir", place.folder, "--tokenizer", LLAMA]
    assert words in refused(capsys, tmp_path / "models", *engine, *options)


def test_what_goes_with_an_engine_alone(place, tmp_path, capsys):
    out = tmp_path / "models"
    assert "--tokenizer is not given, and an engine has none" in refused(capsys, out, "--engine-dir", place.folder)
    for flag, *value in (("--tokenizer", LLAMA), ("--plugin-lib", place.library), ("--bounded-cache",)):
        assert f"{flag} is for an engine: give --engine-dir" in refused(capsys, out, "--model", LLAMA, flag, *value)


def test_another_engines_library_is_refused_now(place, tmp_path, capsys):
    other = save_library(tmp_path / "other", compiled=False)
    engine = ["--engine-dir", place.folder, "--tokenizer", LLAMA, "--plugin-lib", other]
    assert "built with another plugin library" in refused(capsys, tmp_path / "models", *engine)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "There is no entry tokenizer, and an engine has none"),
        ("tokenizer: 3", "tokenizer is 3; give a name"),
        ("tokenizer: t\npool_bytes: 7", "pool_bytes is 7, which is for a model"),
        ("tokenizer: t\ndtype: float16", "dtype is 'float16', which is for a model"),
        ("tokenizer: t\nplugin_lib: [1]", "plugin_lib is [1]; give a name"),
    ],
)
def test_edited_settings_are_refused_by_name(tmp_path, line, words):
    path = tmp_path / "model.yaml"
    path.write_text(f"format: bpkv-serving-1\nengine: e\n{line}\n")
    with pytest.raises(ConfigError) as error:
        ServingSettings.read(path)
    assert str(error.value).startswith(f"In {path}: ") and words in str(error.value)


def edit_sidecar(folder: Path) -> None:
    path = folder / "bpkv_config.json"
    path.write_text(path.read_text().replace('"0.3"', '"0.9"'))


def leave_it(folder: Path) -> None:
    """The engine is whole."""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            leave_it,
            "TensorRT-LLM is not installed, and engines are run by its session",
        ),
        (edit_sidecar, "bpkv_config.json was edited or is damaged: its checksum does not fit"),
    ],
)
def test_the_real_server_ends_at_its_start_with_the_reason(place, tritonserver, tmp_path, damage, words):
    folder = Path(shutil.copytree(place.folder, tmp_path / "engine"))
    engine = ["--engine-dir", folder, "--tokenizer", LLAMA, "--plugin-lib", place.library]
    assert write(tmp_path / "models", *engine) == 0
    damage(folder)
    server = TritonServer(tritonserver, tmp_path / "models", tmp_path / "log")
    assert server.process.wait(120) in (1, 2)
    log = (tmp_path / "log").read_text(errors="replace")
    assert words in log and "Traceback" not in log, log[-3000:]
    assert not server.shared_memory()
