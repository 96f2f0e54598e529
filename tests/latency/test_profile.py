"""Profiles as files, and the commands that they become."""

from pathlib import Path

import pytest

from bpkv_trt.errors import BpkvError, ConfigError
from bpkv_trt.latency.nsys_command import Nsys, exporting, recording
from bpkv_trt.latency.profile import NsysOptions, Profile, ServingLoad

PROFILES = Path(__file__).parents[2] / "profiles"
SMALL = "model: smollm2\nprompt_tokens: 100\nanswer_tokens: 4\n"


def read(tmp_path: Path, text: str) -> Profile:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    return Profile.from_yaml(path)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_profiles_that_come_along_are_valid_and_read_back(path: Path, tmp_path: Path) -> None:
    profile = Profile.from_yaml(path)
    assert read(tmp_path, profile.to_yaml()) == profile
    assert "1" in profile.budgets, "ratios need the full cache"


def test_every_option_is_documented() -> None:
    page = (PROFILES.parent / "docs" / "profiling.md").read_text(encoding="utf-8")
    for name in (*Profile.model_fields, *ServingLoad.model_fields, *NsysOptions.model_fields):
        assert f"`{name}`" in page, name


def test_numbers_of_budgets_are_read_as_they_are_written(tmp_path: Path) -> None:
    profile = read(tmp_path, SMALL + "budgets: [1, 0.5, 64t]\noptions: {regime: prefill}\n")
    assert profile.budgets == ("1", "0.5", "64t")
    assert [str(profile.config(budget).budget) for budget in profile.budgets] == ["1", "0.5", "64t"]
    assert profile.config("0.5").regime == ("prefill",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: m\n", ["prompt_tokens", "answer_tokens"]),
        (SMALL + "budget: 1\n", ["budget is not an option; did you mean budgets?"]),
        (SMALL + "nsys: {tracee: [nvtx]}\n", ["nsys.tracee", "did you mean nsys.trace?"]),
        (SMALL + "nsys: {trace: [cuda]}\n", ["no nvtx"]),
        (SMALL + "nsys: {trace: [gpu, nvtx]}\n", ["nsys.trace.0", "'cuda', 'nvtx'"]),
        (SMALL + "nsys: {capture_range: nvtx}\n", ["nsys.capture", "both or neither"]),
        (SMALL + "nsys: {capture: decode}\n", ["both or neither"]),
        (SMALL + "nsys: {capture_range: nvtx, capture: layer}\n", ["nsys.capture", "'prefill'"]),
        (SMALL + "nsys: {environment: {'A=B': c}}\n", ["'A=B'"]),
        (SMALL + "budgets: []\n", ["budgets"]),
        ("prompt_tokens: 100\n", ["model is missing; give it.", "answer_tokens is missing"]),
        (SMALL + "budgets: [0.2, 0.2]\n", ["0.2 and 0.2, which are the same"]),
        (SMALL + "budgets: [1, 1]\n", ["1 and 1, which are the same"]),
        (SMALL + "budgets: [1, 0.5, 50%]\n", ["0.5 and 50%, which are the same"]),
        (SMALL + "budgets: [2]\n", ["budget"]),
        (SMALL + "budgets: [1, 3x]\n", ["3x"]),
        (SMALL + "options: {budget: 0.2}\n", ["budgets in place of it"]),
        (SMALL + "options: {polici: snapkv}\n", ["did you mean policy?"]),
        (SMALL + "repeats: 0\n", ["repeats"]),
        (SMALL + "serving: {pool_prompts: 2}\n", ["serving.requests is missing"]),
        (SMALL + "serving: {requests: 2}\n", ["serving.pool_prompts and serving.pool_size", "give one"]),
        (SMALL + "serving: {requests: 2, pool_prompts: 2, pool_size: 1MiB}\n", ["give one"]),
        (SMALL + "serving: {requests: 2, pool_size: '64'}\n", ["serving.pool_size", "'64'", "64MiB"]),
        (SMALL + "serving: {requests: 2, pool_prompts: 2, every_s: .inf}\n", ["serving.every_s"]),
        (SMALL + "serving: {requests: 2, pool_prompts: 2, shortest_prompt: 101}\n", ["101", "is 100: give less"]),
        (SMALL + "serving: {request: 2, pool_prompts: 2}\n", ["did you mean serving.requests?"]),
        (SMALL + "prompt_tokens: 5\n", ["given twice"]),
        ("- a\n", ["not a mapping", "model: smollm2"]),
        ("a: [\n", ["not valid YAML"]),
    ],
)
def test_a_profile_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, text)
    assert "profile" in str(refusal.value) and str(tmp_path) in str(refusal.value)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_the_commands_have_every_option_of_the_profile() -> None:
    options = NsysOptions(
        trace=("cuda", "nvtx"),
        capture_range="nvtx",
        capture="compact",
        trace_fork_before_exec=True,
        environment={"A": "1", "B": "x y"},
    )
    assert recording("/bin/nsys", options, ["python", "-m", "x"], Path("out/trace")) == [
        "/bin/nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true",
        "--output=out/trace", "--cuda-graph-trace=node", "--trace-fork-before-exec=true", "--capture-range=nvtx",
        "--capture-range-end=stop", "--nvtx-capture=compact@bpkv", "--env-var=A=1,B=x y", "python", "-m", "x",
    ]  # fmt: skip
    short = recording("nsys", NsysOptions(trace=("nvtx",)), ["x"], Path("t"))
    assert not [option for option in short if "cuda" in option or "capture" in option or "fork" in option]
    assert exporting("nsys", Path("t.nsys-rep"), Path("t.sqlite")) == [
        "nsys", "export", "--type=sqlite", "--force-overwrite=true", "--output=t.sqlite", "t.nsys-rep",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("NVIDIA Nsight Systems version 2022.4.2.1-df9881f", "2022.4.2.1-df9881f"),
        ("NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0", "2025.3.1.90-253135822126v0"),
        ("NVIDIA Nsight Systems version 2021.3.2.4", None),
        ("something else", None),
    ],
)
def test_the_nsys_on_path_is_asked_for_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, version: str | None
) -> None:
    program = tmp_path / "nsys"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if version is None:
        with pytest.raises(BpkvError, match="--tracer builtin"):
            Nsys.find()
    else:
        assert Nsys.find() == Nsys(str(program), version)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert Nsys.find() is None
