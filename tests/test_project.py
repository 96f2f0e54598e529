"""The package as users install it, and the promises of its files."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = r"^(numpy|pydantic|pyyaml|rich|safetensors|nvtx)\b"


def run(*command: str | Path, **environment: str) -> str:
    """Output of a command that must succeed, run away from the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT.anchor, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_light_core_works_alone(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    template = ROOT / "runtime" / "model_repository"
    shipped = {f"bpkv_trt/model_repository_template/{path}" for path in ("bpkv/config.pbtxt", "bpkv/1/model.py")}
    with ZipFile(wheel) as packed:
        found = {name: packed.read(name) for name in packed.namelist() if "model_repository_template" in name}
    assert found.keys() == shipped
    for name, content in found.items():
        assert content == (template / name.removeprefix("bpkv_trt/model_repository_template/")).read_bytes()
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    run(binaries / "python", "-m", "pip", "install", "-qq", wheel)
    installed = run(binaries / "python", "-m", "pip", "list", "--format=freeze").lower()
    assert "torch" not in installed and "transformers" not in installed

    assert run(binaries / "bpkv", "--version").startswith("bpkv ")
    for command in ("generate", "doctor"):
        assert command in run(binaries / "bpkv", "--help")
    findings = run(binaries / "bpkv", "doctor", BPKV_CACHE_DIR=str(tmp_path / "cache"))
    assert re.search(r"^PyTorch: missing: .*pip install 'bpkv-trt\[torch\]'", findings, re.MULTILINE)

    (tmp_path / "prompt.txt").write_text("A prompt.")
    command = [binaries / "bpkv", "generate", "--model", "smollm2", "--prompt-file", tmp_path / "prompt.txt"]
    done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, "a missing extra is told, not thrown"
    assert "pip install 'bpkv-trt[hf]'" in done.stderr


def test_the_command_line_starts_without_torch() -> None:
    loaded = run(sys.executable, "-c", "import sys, bpkv_trt.cli; print(*sys.modules)", PYTHONPATH=str(ROOT)).split()
    assert "bpkv_trt.config" in loaded
    assert not {"torch", "transformers", "gguf", "matplotlib", "fastapi", "uvicorn", "grpc"} & set(loaded)


def test_every_dependency_of_the_light_core_is_one_of_six() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) == 6
    assert all(re.match(CORE, dependency) for dependency in project["dependencies"])
    assert project["license"] == "Apache-2.0" and (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_the_environment_is_named_by_what_it_is_made_from(tmp_path: Path) -> None:
    """A changed input gives another environment; an unchanged one that is complete is only named."""
    scripts = tmp_path / "checkout" / "build_scripts"
    scripts.mkdir(parents=True)
    for name in ("pyproject.toml", "build_scripts/constraints.txt", "build_scripts/environment.py"):
        (tmp_path / "checkout" / name).write_bytes((ROOT / name).read_bytes())
    name = "import environment; print(environment.fingerprint(environment.SOURCES))"
    before = run(sys.executable, "-c", name, PYTHONPATH=str(scripts)).strip()
    assert before == run(sys.executable, "-c", name, PYTHONPATH=str(ROOT / "build_scripts")).strip(), "not by its place"
    made = tmp_path / f"venv-{before}"
    made.mkdir()
    (made / "complete").touch()
    printed = run(sys.executable, scripts / "environment.py", BPKV_ENV_DIR=str(tmp_path)).strip()
    assert Path(printed).is_relative_to(made), "nothing was installed"
    with (scripts / "constraints.txt").open("a") as constraints:
        constraints.write("numpy<3\n")
    assert run(sys.executable, "-c", name, PYTHONPATH=str(scripts)).strip() != before
