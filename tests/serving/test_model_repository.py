"""`bpkv model-repository`: what it writes, and what it leaves alone."""

import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest

from bpkv_trt.cli import main
from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError, InputError
from bpkv_trt.model_repository import check_output, template, write_repository
from bpkv_trt.runtime.triton_request import NAMES
from bpkv_trt.serving_settings import ServingSettings
from tests.serving.conftest import TINY

COMMAND = ["model-repository", "--model", str(TINY)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["model-repository", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("bpkv: ") and printed.err.count("\n") == 1
    return printed.err


def test_it_writes_the_template_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any directory a server is started in: a model given by a relative path is found."""
    monkeypatch.chdir(TINY.parent)
    out = tmp_path / "a" / "models"
    options = ["--budget", "0.3", "--regime", "prefill", "--pool-size", "2MiB", "--queue-limit", "3"]
    options += ["--trace", str(Path(os.path.relpath(tmp_path), "trace.json"))]
    assert main(["model-repository", "--model", "tiny-llama", "--output", str(out), *options]) == 0
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == {"bpkv/config.pbtxt", "bpkv/1/model.py", "bpkv/1/model.yaml"}
    assert list(out.iterdir()) == [out / "bpkv"]
    for name in ("config.pbtxt", "1/model.py"):
        assert (out / "bpkv" / name).read_bytes() == (template() / name).read_bytes()
    settings = ServingSettings.read(out / "bpkv" / "1" / "model.yaml")
    assert settings.model == str(TINY) and settings.pool_bytes == 2 << 20 and settings.queue_limit == 3
    assert settings.config == BpkvConfig(budget="0.3", regime="prefill")
    assert settings.trace is not None and os.path.samefile(Path(settings.trace).parent, tmp_path)


def test_the_description_has_every_input_that_is_read_and_no_other() -> None:
    inputs, outputs = (template() / "config.pbtxt").read_text().split("\noutput [")
    assert sorted(re.findall(r'name: "(\w+)" data_type', inputs)) == sorted(NAMES)
    assert "decoupled: true" in inputs and len(re.findall("data_type", outputs)) == 7


def test_one_of_ours_is_replaced(tmp_path: Path) -> None:
    assert main([*COMMAND, "--output", str(tmp_path), "--budget", "0.3"]) == 0
    (tmp_path / "bpkv" / "1" / "__pycache__").mkdir()  # a server leaves it
    (tmp_path / "bpkv" / "1" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"code")
    assert main([*COMMAND, "--output", str(tmp_path), "--budget", "0.4"]) == 0
    assert ServingSettings.read(tmp_path / "bpkv" / "1" / "model.yaml").config == BpkvConfig(budget="0.4")
    assert not (tmp_path / "bpkv" / "1" / "__pycache__").exists() and list(tmp_path.iterdir()) == [tmp_path / "bpkv"]


@pytest.mark.parametrize("name", ["notes.txt", "2/model.py", "1/tokenizer.json", "1/x/__pycache__/y.pyc", ".hidden"])
def test_what_a_user_put_into_one_of_ours_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([*COMMAND, "--output", str(tmp_path), "--budget", "0.3"]) == 0
    capsys.readouterr()
    (tmp_path / "bpkv" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "bpkv" / name).symlink_to("nowhere")
    told = refused(capsys, "--model", str(TINY), "--output", str(tmp_path), "--budget", "0.4")
    assert f"{name} is there and was not written by" in told and (tmp_path / "bpkv" / name).is_symlink()
    assert ServingSettings.read(tmp_path / "bpkv" / "1" / "model.yaml").config == BpkvConfig(budget="0.3")


@pytest.mark.parametrize("name", ["sp ace", "ünï", "a'b", 'a"b', "a$b", "a;b", "a(b", "a\nb"])
def test_a_path_that_no_server_starts_from_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    for output in (str(tmp_path / name), str(tmp_path / name / "models")):
        assert "Triton starts no model from a path" in refused(capsys, "--model", str(TINY), "--output", output)
    monkeypatch.chdir(tmp_path / name)
    assert "Triton starts no model from a path" in refused(capsys, "--model", str(TINY), "--output", "models")
    assert [*(tmp_path / name).iterdir()] == []


def test_names_that_the_server_s_python_cannot_read_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, table = tmp_path / "mödel", tmp_path / "täble.json"
    shutil.copytree(TINY, model)
    table.write_text('{"weights": [1, 1, 1, 1]}')
    for options in (
        ["--model", str(model)],
        ["--model", str(TINY), "--policy", "snapkv", "--layer-table", str(table)],
        ["--model", str(TINY), "--trace", str(tmp_path / "träce.json")],
    ):
        assert "with letters beyond ASCII" in refused(capsys, "--output", str(tmp_path / "models"), *options)
    assert not (tmp_path / "models").exists()


def test_other_models_beside_it_stay(tmp_path: Path) -> None:
    other = tmp_path / "other" / "config.pbtxt"
    other.parent.mkdir()
    other.write_text("other")
    assert main([*COMMAND, "--output", str(tmp_path)]) == 0
    assert other.read_text() == "other"


@pytest.mark.parametrize("content", ["", "model: smollm2\n", "format: other\nmodel: x\n", "a: [", "\xff"])
def test_a_folder_of_somebody_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    theirs = tmp_path / "bpkv" / "1" / "model.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(content, encoding="latin-1")
    told = refused(capsys, "--model", str(TINY), "--output", str(tmp_path))
    assert "is missing, damaged or not of `bpkv model-repository`" in told
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]
    assert theirs.read_text(encoding="latin-1") == content


def test_links_and_files_in_its_place_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link would be followed to a folder of somebody else."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "bpkv").symlink_to(elsewhere)
    assert "left as it is" in refused(capsys, "--model", str(TINY), "--output", str(tmp_path / "linked"))
    assert list(elsewhere.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(capsys, "--model", str(TINY), "--output", str(tmp_path / "file"))


def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*COMMAND, "--output", str(tmp_path), "--budget", "0.3"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rename, calls = os.replace, []

    def fail(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr("os.replace", fail)
    assert main([*COMMAND, "--output", str(tmp_path), "--budget", "0.4"]) == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_full_disk_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # less than the template has, so writing it fails for real
    try:
        told = refused(capsys, "--model", str(TINY), "--output", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert "cannot be written (File too large)" in told and not [*tmp_path.iterdir()]


REFUSED = [
    ([], "Neither --model nor --engine-dir is given"),
    (["--model", str(TINY), "--engine-dir", "e"], "Both are given"),
    (["--model", "/nowhere/model"], "There is no model at"),
    (["--model", str(TINY), "--budget", "7"], "a fraction above 1"),
    (["--model", str(TINY), "--policy", "best"], "not a policy"),
    (["--model", str(TINY), "--policy", "kvzip", "--regime", "generation"], "regime"),
    (["--model", str(TINY), "--regime", "generation", "--budget", "0.2"], "budget"),
    (["--model", str(TINY), "--layer-table", "/nowhere"], "does not exist"),
    (["--model", str(TINY), "--pool-size", "7"], "--pool-size"),
    (["--model", str(TINY), "--queue-limit", "0"], "queue_limit"),
    (["--model", str(TINY), "--chunk-tokens", "x"], "invalid int"),
    (["--model", str(TINY), "--timeout-s", "nan"], "timeout_s"),
    (["--model", str(TINY), "--trace", str(TINY / "config.json")], "is no document of bpkv"),
]


@pytest.mark.parametrize("arguments, told", REFUSED, ids=lambda value: " ".join(value)[-40:] if value else "nothing")
def test_what_no_server_could_serve_is_refused_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert told in refused(capsys, "--output", str(tmp_path / "models"), *arguments)
    assert not (tmp_path / "models").exists()


def test_what_the_hub_will_be_asked_for_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, told in ((str(TINY), False), ("smollm2", False), ("tests/no-model", True)):
        assert main(["model-repository", "--output", str(tmp_path), "--model", model]) == 0
        assert (f"note: {model} is no file or folder here" in capsys.readouterr().out) == told


def test_settings_come_back_as_they_were_written(tmp_path: Path) -> None:
    config = BpkvConfig(budget="64MiB", policy="ripplekv", layer_table=tmp_path / "table.json")
    options = config.model_dump(mode="json", exclude_unset=True)
    settings = ServingSettings("smollm2", options, pool_bytes=7, timeout_s=0.5, trace="/a/b")
    (tmp_path / "model.yaml").write_text(settings.to_yaml(), encoding="utf-8")
    read = ServingSettings.read(tmp_path / "model.yaml")
    assert read == settings and read.config == config


@pytest.mark.parametrize(
    "line, told",
    [
        ("pool: 3", "'pool'; the entries are"),
        ("pool_bytes: true", "whole number"),
        ("pool_bytes: 1.5", "whole number"),
        ("timeout_s: .inf", "seconds"),
        ("dtype: 3", "give a name"),
        ("trace: trace.json", "full path of a file"),
        ("trace: 3", "full path of a file"),
        ("trace: /é", "with letters beyond ASCII"),
        ("compression: {budgt: 1}", "did you mean budget"),
        ("compression: [1]", "mapping under compression"),
        ("x: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("x: &a [*a]", "aliases (*) and tags (!) are not taken"),
        ("model: gemma3-270m", "model is given twice"),
        ("pool_bytes: 0x10", "is not a plain number"),
        ("x: 1", "'x'; the entries are"),
        ("engine: e", "an entry model or an entry engine, and not both"),
        ("tokenizer: t", "tokenizer is 't', which is for an engine"),
        ("bounded_cache: 1", "give true or false"),
    ],
)
def test_edited_settings_are_refused_by_name(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(f"format: bpkv-serving-1\nmodel: smollm2\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        ServingSettings.read(path)
    assert str(path) in str(error.value)


def test_a_repository_in_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for output in (tmp_path / "file" / "models", tmp_path / "link", tmp_path / "link" / "models", Path("/proc/models")):
        with pytest.raises(InputError, match="is a file|a link to nowhere|cannot be written to"):
            check_output(output)
    assert write_repository(tmp_path, ServingSettings("smollm2")) == tmp_path / "bpkv"
