"""The scripts around the build command: the literal `trtllm-build --plugin bpkv`, and a model to an engine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bpkv_trt.trtllm.sidecar import EngineSidecar
from tests.trtllm.build_place import ROOT, BuildPlace, save_checkpoint, save_library

pytest.importorskip("triton", reason="compiles kernels")
SMALL = ["--bpkv_positions", "1", "--bpkv_top_k", "2", "--bpkv_targets", "80"]


@pytest.fixture
def place(tmp_path: Path) -> BuildPlace:
    return BuildPlace.make(tmp_path, save_library(tmp_path / "library"), tmp_path / "cache")


@pytest.fixture(params=["bash", "zsh"])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return str(request.param)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Another clone, whose name has a space in it, beside a folder that CDPATH would lead into."""
    folder = tmp_path / "a clone"
    for path in ("build_scripts/activate", "build_scripts/bin/trtllm-build"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


def printed(shell: str, script: str, folder: Path, **environment: str | None) -> list[str]:
    """The lines that a shell prints, which fails where a command does or a variable is not set."""
    given = {name: value for name, value in (os.environ | environment).items() if value is not None}
    flags = {"bash": ["--norc"], "zsh": ["-f"]}[shell]
    done = subprocess.run([shell, *flags, "-euc", script], cwd=folder, env=given, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_command_and_the_package_are_found_until_it_is_undone(shell: str, clone: Path) -> None:
    script = """
    show() { printf '%s\\n' "$PATH" "${PYTHONPATH-unset}" "$(command -v trtllm-build || echo none)"; }
    show
    source build_scripts/activate; show
    source build_scripts/activate; show
    PATH=$PATH:/later
    deactivate_bpkv; show
    if typeset -f deactivate_bpkv _bpkv_without _bpkv_leave >/dev/null || [[ -n ${_BPKV_CLONE-} ]]; then echo left; fi
    """
    lines = printed(shell, script, clone, PYTHONPATH=None, CDPATH="/usr:.")
    path = lines[0]
    once = [f"{clone}/build_scripts/bin:{path}", str(clone), f"{clone}/build_scripts/bin/trtllm-build"]
    assert lines == [path, "unset", "none", *once, *once, f"{path}:/later", "unset", "none"]


def test_what_was_there_before_stays(shell: str, clone: Path) -> None:
    """Entries of others, and a clone that was activated before is replaced."""
    script = f"""
    source {ROOT}/build_scripts/activate
    source "$PWD/build_scripts/activate"
    printf '%s\\n' "$PYTHONPATH" "$PATH"
    deactivate_bpkv
    printf '%s\\n' "$PYTHONPATH" "$PATH"
    """
    lines = printed(shell, script, clone, PYTHONPATH="/one:/two", PATH="/usr/bin:/bin")
    assert lines == [f"{clone}:/one:/two", f"{clone}/build_scripts/bin:/usr/bin:/bin", "/one:/two", "/usr/bin:/bin"]


def test_the_literal_command(place: BuildPlace) -> None:
    """With the plugin it is ours, without it the stock one; what lies in the current folder is not imported."""
    (place.folder / "argparse.py").write_text("raise ImportError('imported from the current folder')\n")
    script = f'source {ROOT}/build_scripts/activate; cd {place.folder}; trtllm-build "$@"'
    command = ["bash", "-c", script, "-"]
    done = place.run_any(*command, "--plugin", "bpkw", PYTHON=sys.executable)
    assert done.returncode == 2 and done.stderr.startswith("bpkv-trtllm-build: --plugin is 'bpkw'"), done.stderr
    checkpoint = save_checkpoint(place.folder / "checkpoint")
    done = place.run_any(*command, "--checkpoint_dir", checkpoint, PYTHON=sys.executable)
    assert done.returncode == 0 and place.engine()["told"] == ["trtllm-build", "--checkpoint_dir", str(checkpoint)]


def save_model(folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "dtype": "bfloat16", **sizes}))
    return folder


def test_a_model_becomes_an_engine(place: BuildPlace) -> None:
    """Of two ranks. The checkpoint is kept where it was asked for, and used again."""
    model = save_model(place.folder / "a model")
    command = ["bash", ROOT / "build_scripts" / "build_engine.sh", "--model", model, "--tp-size", "2", *SMALL]
    kept = place.folder / "kept" / "checkpoint"
    done = place.run_any(*command, "--output", "engine", "--checkpoint", kept, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "rank0.safetensors", "rank1.safetensors"]
    assert [*kept.parent.iterdir()] == [kept] and place.left_over() == []
    settings = EngineSidecar.read(place.folder / "engine").settings
    assert settings.config.positions == 1
    told = place.engine(1, "engine")["told"]
    assert told[:-4] == [
        *("trtllm-build", "--checkpoint_dir", str(kept), "--output_dir", "engine", "--workers", "2"),
    ]
    written = (kept / "config.json").stat().st_mtime_ns
    done = place.run_any(*command, "--output", "other", "--checkpoint", kept, PYTHON=sys.executable)
    assert done.returncode == 0 and (kept / "config.json").stat().st_mtime_ns == written
    assert EngineSidecar.read(place.folder / "other").settings == settings, "the same kernels"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "build_engine.sh: --model is missing"),
        (["--model", "m"], "build_engine.sh: --output is missing"),
        (["--model"], "build_engine.sh: --model has no value"),
        (["--model", "m", "--output", "o", "--tp-size", "0"], "build_engine.sh: --tp-size is '0'"),
        (["--model", "m", "--output", "o", "--output_dir", "p"], "build_engine.sh: --output_dir is set by this script"),
        (["--model", "m", "--output", "o"], "build_engine.sh: the model 'm' has no config.json"),
        (["--model", "other", "--output", "o"], "convert_checkpoint.py: The model is of OtherModel, which is not cov"),
        (["--model", ".", "--output", "o"], "convert_checkpoint.py: The model's configuration config.json names no"),
        (["--model", "other", "--output", "o", "--dtype", "int3"], "convert_checkpoint.py: argument --dtype: invalid"),
    ],
    ids=str,
)
def test_what_a_model_cannot_become(place: BuildPlace, arguments: list[str], words: str) -> None:
    save_model(place.folder / "other", "OtherModel")
    (place.folder / "config.json").write_text("{}")
    before = sorted(place.folder.rglob("*"))
    done = place.run_any("bash", ROOT / "build_scripts" / "build_engine.sh", *arguments, PYTHON=sys.executable)
    assert done.returncode == 2 and done.stderr.startswith(words.partition(":")[0]) and words in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path for path in sorted(place.folder.rglob("*")) if path not in before] == []


def test_without_a_library_it_is_built_first(place: BuildPlace) -> None:
    """By the one script that does, which says what it lacks; a model that is not there is refused before."""
    if any((ROOT / folder / "libbpkv_plugin.so").exists() for folder in ("bpkv_trt", "out/plugin")):
        pytest.skip("this clone has a library")
    save_model(place.folder / "m")
    kept = save_checkpoint(place.folder / "kept")
    for named, first in (
        (["m"], "build_plugin.sh: "),
        (["n"], "build_engine.sh: the model 'n' has no config.json"),
        (["n", "--checkpoint", "absent"], "build_engine.sh: the model 'n' has no config.json"),
        (["n", "--checkpoint", kept], "build_plugin.sh: "),  # which is used as it is
    ):
        command = ["bash", ROOT / "build_scripts" / "build_engine.sh", "--output", "o", "--model", *named]
        done = place.run_any(*command, PYTHON=sys.executable, BPKV_PLUGIN_PATH="", CXX="absent")
        assert done.returncode == 2 and done.stderr.startswith(first), done.stderr


def test_help_of_the_script() -> None:
    done = subprocess.run(["bash", ROOT / "build_scripts/build_engine.sh", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--checkpoint DIR" in done.stdout and "--bpkv_budget" in done.stdout
