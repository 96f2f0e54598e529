"""The page that leads from a model to an answer: its commands are run, in its order, as far as stand-ins reach."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from bpkv_trt.cli import main
from bpkv_trt.config import BpkvConfig
from bpkv_trt.generate_command import NOT_OF_ENGINES
from bpkv_trt.kernels.aot import TARGETS
from bpkv_trt.trtllm.settings import ONLY
from build_scripts.recall_text import recall_prompt
from tests.trtllm.build_place import ROOT, BuildPlace, save_library
from tests.trtllm.runner_place import LLAMA
from tests.trtllm.test_build_scripts import save_model

PAGE = ROOT / "build_scripts" / "README.md"
MARKS = ("run by the tests", "run by tests/", "not run here: ")


class Block(NamedTuple):
    language: str
    mark: str
    code: str

    @property
    def commands(self) -> list[str]:
        """Of a shell; a line that ends in a backslash goes on."""
        return self.code.replace("\\\n", " ").splitlines()


def blocks() -> list[Block]:
    found = re.findall(r"^```(\w*)\n# ([^\n]*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert 2 * len(found) == PAGE.read_text().count("```"), "a block without a mark"
    return [Block(*each) for each in found]


TRIED = [block for block in blocks() if block.mark == "run by the tests"]
SHELL = [command for block in TRIED if block.language == "sh" for command in block.commands]
GENERATE = [command for command in SHELL if command.startswith("bpkv generate ")]
BUILD = [command for command in SHELL if command not in GENERATE]


def test_every_block_says_whether_it_was_tried():
    assert all(block.mark.startswith(MARKS) and block.language in ("sh", "python") for block in blocks())
    assert len(TRIED) == 9 and len(GENERATE) == 2 and len(BUILD) == 8
    for block in blocks():
        if block.mark.startswith("run by tests/"):
            source = (ROOT / block.mark.removeprefix("run by ")).read_text()
            for command in block.commands:
                script = next(word for word in shlex.split(command) if word.endswith(".sh"))
                assert f'"{script}"' in source, f"{command} is not run there"


def test_the_commands_that_build(tmp_path):
    """In a clone beside a model, with the sizes of the page."""
    pytest.importorskip("triton", reason="compiles kernels")
    place = BuildPlace.make(tmp_path, save_library(tmp_path / "library"), tmp_path / "cache")
    install_for_doctor(tmp_path / "packages")
    save_model(tmp_path / "model")
    for folder in ("bpkv_trt", "build_scripts"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    done = place.run_any("bash", "-euc", "\n".join(BUILD), PYTHON=sys.executable, PATH=path_with_commands(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the engine's settings are in engine/bpkv_config.json") == 2
    assert "engine: ok: engine, kernels for 90a, and no GPU here" in done.stdout, done.stdout
    told = place.engine(0, "engine")["told"]
    assert told[told.index("--max_num_tokens") + 1] == "32768"
    assert "context manager" in (tmp_path / "prompt.txt").read_text(), "what the question is about"
    files = {path.name for path in (tmp_path / "engine").iterdir()}
    assert {name for name in files if f"`{name}`" in PAGE.read_text()} == files


def install_for_doctor(packages):
    """What a package manager would note of the packages that stand in."""
    for name, version in (("tensorrt", "10.14.1"), ("tensorrt_llm", "1.2.1")):
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def path_with_commands(folder):
    """PATH, where `python3` is the one that runs the tests, and `bpkv` this checkout's."""
    binaries = folder / "bin"
    binaries.mkdir()
    for name, command in (("python3", sys.executable), ("bpkv", f"{sys.executable} -m bpkv_trt")):
        (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (binaries / name).chmod(0o755)
    return f"{binaries}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def at_hand(place, tmp_path, monkeypatch):
    """The folder that the page is read in."""
    shutil.copytree(place.folder, tmp_path / "engine")
    (tmp_path / "model").symlink_to(LLAMA)
    (tmp_path / "prompt.txt").write_text(recall_prompt(11, 250)[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", GENERATE)
def test_the_commands_that_answer(at_hand, capsys, command):
    assert main(shlex.split(command)[1:]) == 0
    assert "entries kept" in capsys.readouterr().out
    assert (at_hand / "out.json").exists() == ("--json" in command)


def test_the_code(at_hand, capsys):
    scope: dict[str, object] = {}
    for block in TRIED:
        if block.language == "python":
            exec(compile(block.code, PAGE, "exec"), scope)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].endswith("]") and "length" in lines[0]
    text = lines[0].partition(" length ")[0]
    assert text and lines[2].startswith(text), "the runner of TensorRT-LLM has the same answer"


def test_what_the_page_says_of_options_is_so():
    """Its tables of what can change at run time, and of what cannot be combined."""
    text = PAGE.read_text()
    first = next(line for line in text.splitlines() if line.startswith("| `--budget`"))
    free, fixed = (set(re.findall(r"`--([\w-]+)`", part)) for part in first.strip("|").split("|"))
    fields = {name.replace("_", "-") for name in BpkvConfig.model_fields}
    refused = {name.replace("_", "-") for name in (*ONLY, *NOT_OF_ENGINES)}
    assert free | fixed | {"positions"} == fields - refused and not free & fixed
    table = text.partition("## What cannot be combined")[2].partition("## Memory")[0]
    shown = set(re.findall(r"`--([\w-]+)", table)) | {"policy"}  # which it calls by name
    assert shown == refused


def test_the_table_of_targets_has_them_all():
    shown = re.findall(r"^  \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert shown == list(TARGETS)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
    assert Path("build_scripts/README.md") in [
        Path(os.path.normpath(Path(name).parent / link))
        for name in ("README.md", "docs/engine.md")
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text())
    ]
