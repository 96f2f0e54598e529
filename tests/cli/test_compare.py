"""`bpkv compare` end to end on a trained model: its document, resuming, processes, pictures, and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from bpkv_trt.cli import main
from bpkv_trt.compare_command import report_lines

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "tests" / "assets" / "tiny-llama"
ARGUMENTS = {
    "--model": str(LLAMA), "--tasks": "passkey,redundant_facts", "--policies": "bpkv[refine=4],snapkv,full",
    "--budgets": "0.5,0.2", "--samples": "2", "--tokens": "500", "--horizon": "10",
}  # fmt: skip
TIMED = {"compress_s", "decode_s", "commit"}


def arguments(**changed: str) -> list[str]:
    given = {**ARGUMENTS, **{f"--{name.replace('_', '-')}": value for name, value in changed.items()}}
    return ["compare", *(part for pair in given.items() for part in pair)]


def compare(out: Path, *more: str, **changed: str) -> dict[str, Any]:
    assert main([*arguments(**changed), "--json", str(out), *more]) == 0
    assert not journal(out).exists()
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document


def journal(out: Path) -> Path:
    return out.with_name(out.name + ".partial.jsonl")


def refused(capsys: pytest.CaptureFixture[str], *more: str, **changed: str) -> str:
    assert main([*arguments(**changed), *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("bpkv: ") and printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in TIMED}
    return [untimed(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module", autouse=True)
def one_thread_everywhere() -> Iterator[None]:
    """In this process and in those it starts: on some processors more threads round in another way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(one_thread_everywhere: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compare(tmp_path_factory.mktemp("whole") / "out.json")


def test_the_document_has_every_key_and_its_numbers_add_up(whole: dict[str, Any]) -> None:
    assert (whole["schema_version"], whole["kind"], whole["seeds"]) == (1, "compare", [0, 1])
    assert {"commits", "versions", "machine", "settings", "samples", "skipped", "mask_study"} <= whole.keys()
    assert len(whole["cells"]) == 2 * 2 * 3 * 2 and len(whole["rows"]) == 3 * 3 * 2
    keys = {
        "model", "policy", "contender", "regime", "scope", "task", "budget", "samples", "accuracy", "future_kl_mean",
        "future_kl_median", "future_kl_low", "future_kl_high", "future_kl_max", "future_kl_first", "top1_agreement",
        "common_prefix", "entries_fraction", "bytes_after", "pages_freed", "compress_s", "decode_s", "answers",
        "accuracy_full", "accuracy_over_full", "skipped", "estimate_ratio", "estimate_spearman", "retention", "paired",
    }  # fmt: skip
    for row in whole["rows"]:
        assert keys <= row.keys()
        cells = [
            cell
            for cell in whole["cells"]
            if (cell["contender"], cell["budget"]) == (row["contender"], row["budget"])
            and row["task"] in (cell["task"], "all")
        ]
        assert row["samples"] == len(cells) == (4 if row["task"] == "all" else 2)
        mean = sum(cell["future_kl_mean"] for cell in cells) / len(cells)
        assert row["future_kl_mean"] == pytest.approx(mean) and len(row["paired"]) == 2
        limit = 1.0 if row["policy"] == "full" else float(row["budget"])
        assert limit - 0.01 < row["entries_fraction"] <= limit
        if row["policy"] == "full":
            assert row["future_kl_max"] < 1e-9 and row["accuracy_over_full"] in (None, 1.0)
    configs = {arm["contender"]: arm["config"] for arm in whole["settings"]["arms"]}
    assert configs["bpkv[refine=4]"]["refine"] == 4 and configs["snapkv"]["scope"] == "head"


def test_what_is_printed_is_one_aligned_line_per_row(whole: dict[str, Any]) -> None:
    """Numbers end where their header ends, texts begin where it begins, and words split a line into its columns."""
    rows = [*whole["rows"], {**whole["rows"][0], "accuracy": None, "contender": "bpkv[refine=4,readout=direct]"}]
    header, *lines = report_lines({**whole, "rows": rows})
    names = header.split()
    assert len(lines) == len(rows) and {len(line) for line in lines} == {len(header)}
    for row, line in zip(rows, lines, strict=True):
        cells = dict(zip(names, line.split(), strict=True))
        assert [cells[name] for name in names[:4]] == [row[name] for name in names[:4]]
        assert float(cells["future-KL"]) == pytest.approx(row["future_kl_mean"], rel=0.005)
        assert float(cells["MiB"]) == pytest.approx(row["bytes_after"] / 2**20, abs=0.0051)
        assert cells["right"] == ("-" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f}%")
    for place, name in enumerate(names):
        found = re.search(rf"(?<!\S){re.escape(name)}(?!\S)", header)
        assert found is not None
        for line in lines:
            if place < 4:
                assert line[found.start()] != " " and line[: found.start()][-1:] in ("", " ")
            else:
                assert line[found.end() - 1] != " " and line[found.end() :][:1] in ("", " ")


def test_what_is_printed_has_no_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path / "out.json", samples="1", tasks="passkey")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\t" not in printed
    assert len(printed.splitlines()) == 1 + 3 * 2 and printed.startswith("task ")


def test_too_few_tokens_are_named_as_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, tokens="10")
    fewest = re.search(r"10 tokens are too few .* takes (\d+) or more\. Give --tokens as many", message)
    assert fewest is not None and 10 < int(fewest.group(1)) < 500, message


def test_processes_give_the_same_as_one(whole: dict[str, Any], tmp_path: Path) -> None:
    assert untimed(compare(tmp_path / "out.json", jobs="2")) == untimed(whole)


def test_a_killed_run_continues_to_the_same_document(whole: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bpkv_trt", *arguments(), "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not journal(out).exists() or journal(out).read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    lines = journal(out).read_bytes().splitlines(keepends=True)
    journal(out).write_bytes(b"".join(lines[:2]) + lines[1][: len(lines[1]) // 2])  # killed in the middle of a line
    assert untimed(compare(out)) == untimed(whole)


def test_a_finished_run_is_not_repeated_and_grows(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    compare(out, samples="1", tasks="passkey")
    assert untimed(compare(out)) == untimed(whole)
    assert "1 of 4 samples had been measured before" in capsys.readouterr().out
    before = out.read_bytes(), out.stat().st_mtime_ns
    compare(out)
    assert "4 of 4 samples had been measured before" in capsys.readouterr().out
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before


def test_results_of_something_else_are_refused_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    compare(out, samples="1", tasks="passkey")
    capsys.readouterr()
    document = json.loads(out.read_text())
    header = {"kind": "compare", "schema_version": 1, "settings": document["settings"]}
    for content, words in [
        (json.dumps(document), ["horizon was 10 and is now 11"]),
        (json.dumps({**document, "schema_version": 0}), ["schema version 0"]),
        (json.dumps({**document, "kind": "generate"}), ["not a result of bpkv compare"]),
        ("{}", ["not a result of bpkv compare"]),
        ("not json", ["not a result of bpkv compare"]),
    ]:
        out.write_text(content)
        message = refused(capsys, "--json", str(out), horizon="11")
        assert all(word in message for word in (*words, str(out), "--overwrite")), message
        assert out.read_text() == content and [*tmp_path.iterdir()] == [out]
    out.unlink()
    for content, words in [
        (json.dumps(header) + "\n", ["horizon was 10 and is now 11"]),
        (json.dumps({**header, "schema_version": 7}) + "\n", ["schema version 7"]),
        ("something else\n", ["cannot be read"]),
    ]:
        journal(out).write_text(content)
        message = refused(capsys, "--json", str(out), horizon="11")
        assert all(word in message for word in (*words, str(journal(out)))), message
        assert journal(out).read_text() == content and [*tmp_path.iterdir()] == [journal(out)]
    compare(out, "--overwrite", samples="1", tasks="passkey", horizon="11")
    message = refused(capsys, "--json", str(out), policies="snapkv,full") if capsys.readouterr() else ""
    assert "snapkv" in message


DAMAGE: list[Callable[[dict[str, Any]], Any]] = [
    lambda found: found["cells"].pop(),
    lambda found: found["cells"].append(found["cells"][0]),
    lambda found: found.pop("cells"),
    lambda found: found["samples"][0].pop("masks"),
    lambda found: found["samples"][0].update(seed=[0]),
    lambda found: found["skipped"].append({"task": "passkey", "seed": 7}),
    lambda found: found["settings"]["arms"][0].pop("contender"),
    lambda found: found["settings"].update(arms=[1]),
    *(
        partial(lambda name, value, found: found["cells"][1].update({name: value}), name, value)
        for name in ("future_kl_mean", "top1", "correct", "tokens", "entries_fraction", "retention", "notes", "budget")
        for value in ("x", [None], {"a": 1}, 7.5)
        if (name, value) not in (("notes", ["x"]), ("entries_fraction", 7.5), ("future_kl_mean", 7.5), ("top1", 7.5))
    ),
    *(
        partial(lambda name, found: found["cells"][1].pop(name), name)
        for name in ("future_kl_max", "scope", "pages_freed", "correct_full", "compress_s", "retention", "seed")
    ),
]


def test_a_damaged_result_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: dict[str, Any]
) -> None:
    """Before anything is measured, by what is asked for more of."""
    out = tmp_path / "out.json"
    for damage in DAMAGE:
        found = json.loads(json.dumps(whole))
        damage(found)
        out.write_text(json.dumps(found))
        message = refused(capsys, "--json", str(out), samples="3")
        assert "--overwrite" in message and "Error" not in message and len(message) < 1000, message
        assert json.loads(out.read_text()) == found and [*tmp_path.iterdir()] == [out]
    record = {**whole["samples"][0], "cells": [{}]}
    header = {"kind": "compare", "schema_version": 1, "settings": whole["settings"]}
    out.unlink()
    journal(out).write_text(f"{json.dumps(header)}\n{json.dumps(record)}\n")
    assert "is damaged" in refused(capsys, "--json", str(out))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tasks": "passkey,passkeys"}, ["passkeys", "niah_single"]),
        ({"tasks": "passkey,"}, ["tasks", "comma"]),
        ({"tasks": "passkey,passkey"}, ["passkey", "once"]),
        ({"policies": "snapkw"}, ["snapkw", "snapkv"]),
        ({"policies": "bpkv,bpkv"}, ["bpkv", "more than once"]),
        ({"policies": "bpkv[budget=1]"}, ["budget", "same for all"]),
        ({"budgets": "0.5,1.5x"}, ["1.5x", "0.2"]),
        ({"samples": "-1"}, ["samples is -1, and nothing can be measured"]),
        ({"budgets": "0.5,0.5"}, ["0.5", "which are the same"]),
        ({"budgets": "8t"}, ["8t", "36"]),
        ({"regime": "generation"}, ["0.5", "64t"]),
        ({"regime": "generation", "budgets": "64t"}, ["passkey", "generation"]),
        ({"regime": "prefill", "tasks": "counting"}, ["counting", "--regime generation"]),
        ({"regime": "deferred", "tasks": "two_questions"}, ["two_questions", "--regime prefill"]),
        ({"regime": "prefill", "policies": "deferkv"}, ["deferkv", "prefill"]),
        ({"samples": "0"}, ["samples", "0"]),
        ({"samples": "x"}, ["--samples", "'x'"]),
        ({"tokens": "-5"}, ["tokens", "-5"]),
        ({"jobs": "0"}, ["jobs", "0"]),
        ({"seed": "-1"}, ["seed is -1 and cannot be negative"]),
        ({"masks": "-1"}, ["masks is -1 and cannot be negative"]),
        ({"memory_limit": "much"}, ["--memory-limit", "much"]),
        ({"model": "no/such/model"}, ["no/such/model"]),
        ({"tokens": "40"}, ["No sample could be measured", "too few"]),
        ({"memory_limit": "1kB"}, ["No sample could be measured", "MiB"]),
        ({"budgets": "1kB"}, ["1kB", "protected", "passkey", "seed 0"]),
    ],
    ids=str,
)
def test_bad_input_leaves_nothing_behind(
    changed: dict[str, str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "--json", str(tmp_path / "out.json"), **changed)
    assert all(word in message for word in words), message
    assert not [*tmp_path.iterdir()]


def test_a_file_cannot_set_what_the_comparison_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "common.yaml"
    file.write_text("sinks: 2\nregime: deferred\nseed: 7\n")
    message = refused(capsys, "--config", str(file))
    assert all(word in message for word in (str(file), "has regime, seed")) and "sinks" not in message, message


def test_places_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in refused(capsys, "--plot", str(tmp_path / "file"))
    assert "does not exist" in refused(capsys, "--plot", str(tmp_path / "absent" / "plots"))
    assert "cannot be written to" in refused(capsys, "--plot", "/proc/plots")
    (tmp_path / "link").symlink_to("nowhere")
    assert "a link to nowhere" in refused(capsys, "--plot", str(tmp_path / "link"))
    (tmp_path / "link.json").symlink_to("absent/out.json")
    assert "/absent for link.json does not exist" in refused(capsys, "--json", str(tmp_path / "link.json"))
    for name in ("kl_prefill.png", "accuracy_deferred.png", "retention_generation.png", "masks_random_prefill.png"):
        (tmp_path / name).write_text("theirs")
        assert f"{name} is there and was not drawn by bpkv" in refused(capsys, "--plot", str(tmp_path))
        (tmp_path / name).unlink()
    assert "is a directory" in refused(capsys, "--json", str(tmp_path))
    assert "--json" in refused(capsys, "--overwrite")


def test_not_even_overwriting_takes_the_place_of_an_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, config, model = tmp_path / "table.json", tmp_path / "common.yaml", tmp_path / "model.gguf"
    table.write_text('{"weights": [1, 2, 3, 4]}')
    config.write_text("sinks: 2\n")
    model.write_bytes(b"GGUF")
    for path, flag, more, changed in [
        (table, "--layer-table", ["--layer-table", str(table)], {"policies": "bpkv"}),
        (table, "--layer-table", [], {"policies": f"bpkv[layer_table={table}],bpkv"}),
        (config, "--config", ["--config", str(config)], {}),
        (model, "--model", [], {"model": str(model)}),
    ]:
        content = path.read_bytes()
        message = refused(capsys, "--overwrite", "--json", str(path), *more, **changed)
        assert f"--json would overwrite the file given to {flag}" in message and path.read_bytes() == content


def test_a_result_that_another_run_adds_to_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    with FileLock(tmp_path / "out.json.lock"):
        message = refused(capsys, "--json", str(out), "--overwrite")
        assert "Another run" in message and str(out) in message and not out.exists() and not journal(out).exists()
    compare(out, samples="1", tasks="passkey")
    assert [*tmp_path.iterdir()] == [out]


def test_without_matplotlib_pictures_are_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "bpkv_trt.evaluation.plots", raising=False)
    message = refused(capsys, "--plot", str(tmp_path / "plots"))
    assert "matplotlib" in message and "bpkv-trt[plot]" in message and not [*tmp_path.iterdir()]


def test_an_interrupt_keeps_what_is_finished_and_ends_the_workers(tmp_path: Path) -> None:
    """With far more samples than are done by then, and interrupts as a terminal's job has them: a background job of a
    script ignores them, and so would all that it starts, these tests and the command among it.
    """
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bpkv_trt", *arguments(samples="1000", jobs="2"), "--json", str(out)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    try:
        while not journal(out).exists() or journal(out).read_bytes().count(b"\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers too
        printed, error = process.communicate(timeout=60)
        assert process.returncode == 130 and printed == "" and error.count("\n") == 1, error
        assert "interrupted" in error and str(journal(out)) in error and "continues" in error
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        assert not out.exists()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
