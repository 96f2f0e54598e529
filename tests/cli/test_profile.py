"""`bpkv profile` end to end on a trained model: a session, its folder and report; a script plays Nsight Systems."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure

from bpkv_trt.cli import main
from bpkv_trt.latency import answer_run, session
from bpkv_trt.latency.profile import Profile
from bpkv_trt.progress import SilentProgress
from bpkv_trt.runtime.fitted_engine import fitted_engine

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "tests" / "assets" / "tiny-llama"
PROMPT, ANSWER, LAYERS, KV_HEADS, ROW_BYTES, PAGE = 200, 6, 4, 2, 2 * 32 * 4, 8
BUDGETS = ("1", "0.5", "0.25")

# Runs the command that it is to record, and exports the trace that this leaves as Nsight Systems would.
NSYS = """#!{python}
import json, pathlib, subprocess, sys
sys.path.insert(0, "{root}")
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2024.5.1.113-245134619542v0")
    sys.exit()
options = dict(each.split("=", 1) for each in sys.argv[2:] if each.startswith("--") and "=" in each)
if sys.argv[1] == "profile":
    print("Generating a report")
    command = sys.argv[sys.argv.index("{python}"):]
    status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    if status == 0 and {reports}:
        pathlib.Path(options["--output"] + ".nsys-rep").write_bytes(b"report")
    sys.exit(status or {status})
from tests.latency.nsys_export import Launch, Range, write_export
database = pathlib.Path(options["--output"])
events = json.loads(database.with_name("trace.json").read_text())["traceEvents"]
events = [event for event in events if event["ph"] == "X"]
ranges = [Range(event["name"], round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"])),
          payload=event["args"].get("payload"), domain="{domain}") for event in events]
starts = [each.start for each in ranges if each.name == "score"]
write_export(database, ranges, [Launch("score_kernel", start + 1, start + 5, start + 105) for start in starts])
"""


@pytest.fixture(autouse=True)
def _away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No nsys, unless a test brings one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    content = {
        "model": str(LLAMA), "prompt_tokens": PROMPT, "answer_tokens": ANSWER, "budgets": [1, 0.5, 0.25], "repeats": 2,
        "warmup": 1, "options": {"regime": "prefill", "page_size": PAGE, "lookahead": 0, "rehearsal": 0},
        "nsys": {"trace": ["nvtx"]},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(content))
    return path


def bring_nsys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: str = "bpkv", reports: bool = True, status: int = 0
) -> Path:
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS.format(python=sys.executable, root=ROOT, domain=domain, reports=reports, status=status))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return program


def loaded(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["profile", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("bpkv: ") and output.err.count("\n") == 1 and "Traceback" not in output.err
    return output.err


def test_a_session_leaves_a_folder_whose_numbers_agree(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "run", str(profile)]) == 0
    printed, folder = capsys.readouterr().out, tmp_path / "profile-small"
    runs, report, environment = (loaded(folder / f"{name}.json") for name in ("runs", "report", "environment"))
    assert [(run["budget"], run["repeat"]) for run in runs["runs"]] == [(b, r) for r in (0, 1) for b in BUDGETS]
    assert [config["budget"] for config in runs["configs"]] == list(BUDGETS)
    assert Profile.from_yaml(folder / "profile.yaml") == Profile.from_yaml(profile)
    assert environment["nsys"] is None and {"machine", "versions", "commit", "commands"} <= environment.keys()

    entries = LAYERS * KV_HEADS * PROMPT
    ranges = {row["range"]: row for row in report["ranges"]}
    counts = {"prefill": 6, "decode": 6 * (ANSWER - 1), "score": 4, "select": 4, "compact": 4}
    assert {name: ranges[name]["count"] for name in counts} == counts, "the warm-up is not in the trace"
    assert ranges["prefill"]["payload"] == 6 * PROMPT and ranges["compact"]["payload"] == 2 * (0.5 + 0.75) * entries
    for name, row in ranges.items():
        seconds = sum(run["seconds"][name] for run in runs["runs"])
        assert row["total_ns"] == pytest.approx(seconds * 1e9, rel=1e-6)
    for row, share in zip(report["budgets"], (1, 0.5, 0.25), strict=True):
        own = [run for run in runs["runs"] if run["budget"] == row["budget"]]
        assert row["entries_fraction"] == share and row["runs"] == len(own) == 2
        assert row["first_token_s"] == pytest.approx(sum(run["first_token_s"] for run in own) / 2)
        assert row["over_full"]["answer_s"] == pytest.approx(row["answer_s"] / report["budgets"][0]["answer_s"])
        for run in own:
            compaction = sum(run["seconds"][name] for name in ("readout", "score", "select", "compact"))
            assert run["seconds"]["prefill"] + compaction <= run["first_token_s"] < run["answer_s"]
            assert run["answer_tokens"] == ANSWER and run["entries_after"] == share * entries
            assert run["bytes_before"] == entries * ROW_BYTES
            assert (run["bytes_peak"] > run["bytes_before"]) == (share == 1), "only there the answer comes on top"
            assert (
                share * entries * ROW_BYTES
                <= run["bytes_after"]
                <= (share * PROMPT + PAGE) / PROMPT * entries * ROW_BYTES
            )
    assert report["memory"]["peak_bytes"] == max(run["bytes_peak"] for run in runs["runs"])
    assert (folder / "report.txt").read_text() in printed + "\n"

    out = tmp_path / "again.json"
    assert main(["profile", "report", str(folder), "--json", str(out), "--plot", str(tmp_path / "pictures")]) == 0
    assert loaded(out) == report
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in pictures] == ["latency_against_budget.png", "timeline.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    again = capsys.readouterr().out
    assert again.splitlines()[1:-2] == printed.splitlines()[1:-2], "the same tables"
    assert main(["profile", "report", str(folder / "trace.json"), "--json", str(out)]) == 0
    assert loaded(out)["ranges"] == report["ranges"] and loaded(out)["budgets"] == []


def test_warm_ups_come_first_and_budgets_take_turns(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def watched(loaded: Any, config: Any, turns: Any, new_tokens: int, trace: Any) -> Any:
        made.append((str(config.budget), len(trace.events)))
        return fitted_engine(loaded, config, turns, new_tokens, trace)

    monkeypatch.setattr(answer_run, "fitted_engine", watched)
    _, trace = session.run_session(Profile.from_yaml(profile), SilentProgress())
    assert trace.cache_bytes is None, "no pool outlives its run"
    assert [budget for budget, _ in made] == 3 * list(BUDGETS), "one warm-up and two repeats"
    recorded = [events for _, events in made]
    assert recorded[:4] == [0, 0, 0, 0] and recorded[3:] == sorted(set(recorded[3:])), "of the runs that count alone"


def test_a_dry_run_prints_what_it_would_do_and_does_nothing(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = bring_nsys(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    assert main(["profile", "run", str(profile), "--dry-run", "--output", "out"]) == 0
    *text, first, second = capsys.readouterr().out.splitlines()
    assert yaml.safe_load("\n".join(text)) == Profile.from_yaml(profile).model_dump(mode="json", exclude_none=True)
    assert first.startswith(f"$ {program} profile --trace=nvtx ") and "--output=out/trace " in first
    assert first.endswith(f" -m bpkv_trt profile run {profile} --tracer builtin --output out")
    assert (
        second
        == f"$ {program} export --type=sqlite --force-overwrite=true --output=out/trace.sqlite out/trace.nsys-rep"
    )
    assert main(["profile", "run", str(profile), "--dry-run", "--tracer", "builtin"]) == 0
    assert "nsys profile" not in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_under_nsys_the_ranges_are_those_that_it_saw(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bring_nsys(tmp_path, monkeypatch)
    assert main(["profile", "run", str(profile), "--output", "out"]) == 0
    report, environment = (loaded(tmp_path / "out" / f"{name}.json") for name in ("report", "environment"))
    assert report["made_by"].startswith("nsys ") and environment["nsys"].startswith("2024.5.1")
    assert len(environment["commands"]) == 2
    assert [(row["range"], row["kernel"], row["count"], row["total_ns"]) for row in report["kernels"]] == [
        ("score", "score_kernel", 4, 400)
    ]
    assert [row["budget"] for row in report["budgets"]] == list(BUDGETS)
    assert "score_kernel" in capfd.readouterr().out


def test_ranges_that_nsys_cannot_see_are_told_and_taken_from_the_trace(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_nsys(tmp_path, monkeypatch, domain="other")
    assert main(["profile", "run", str(profile), "--output", "out"]) == 0
    report = loaded(tmp_path / "out" / "report.json")
    assert report["made_by"] == "bpkv" and any("nvtx==0.2.11" in note for note in report["notes"])


def test_a_session_that_fails_under_nsys_is_told(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bring_nsys(tmp_path, monkeypatch)
    profile.write_text(profile.read_text().replace(str(LLAMA), str(tmp_path / "no-model")))
    assert main(["profile", "run", str(profile), "--output", "out"]) == 2
    first, last = capfd.readouterr().err.strip().splitlines()
    assert "no-model" in first, "what the session itself was refused with"
    assert "ended with status 2 without the file trace.nsys-rep" in last and "out/nsys.log" in last
    assert (tmp_path / "out" / "nsys.log").read_text() == "Generating a report\n"


@pytest.mark.parametrize(
    ("reports", "status", "words"),
    [(False, 0, "status 0 without the file trace.nsys-rep"), (True, 3, "status 3 with the file trace.nsys-rep")],
)
def test_an_nsys_that_records_nothing_or_fails_is_told(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    reports: bool, status: int, words: str,
) -> None:  # fmt: skip
    bring_nsys(tmp_path, monkeypatch, reports=reports, status=status)
    assert main(["profile", "run", str(profile), "--output", "out"]) == 2
    assert words in capfd.readouterr().err
    assert (tmp_path / "out" / "trace.json").exists(), "what the session itself recorded stays"


def test_what_cannot_be_run_is_refused_before_the_model_is_loaded(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nsys" in refusal(capsys, "run", profile, "--tracer", "nsys")
    assert "does not exist" in refusal(capsys, "run", tmp_path / "none.yaml")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert "not empty" in refusal(capsys, "run", profile, "--output", full)
    text = profile.read_text()
    for old, new, words in (
        ("prompt_tokens: 200", "prompt_tokens: 9000", "positions"),
        ("prompt_tokens: 200", "prompt_tokens: 200\nprompt_file: none.txt", "none.txt"),
        ("regime: prefill", "regime: prefill\n  interval: 9", "interval"),
    ):
        assert old in text
        profile.write_text(text.replace(old, new))
        assert words in refusal(capsys, "run", profile)
    assert not (tmp_path / "profile-small").exists()


def test_a_short_text_is_refused(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    profile.write_text(profile.read_text() + f"prompt_file: {tmp_path / 'short.txt'}\n")
    assert "prompt_tokens is 200" in refusal(capsys, "run", profile)


def test_folders_and_files_that_are_no_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no results" in refusal(capsys, "report", tmp_path)
    assert "does not exist" in refusal(capsys, "report", tmp_path / "none.json")
    event = {"name": "decode", "cat": "bpkv", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    for damaged in ("", "{}", '{"runs": []}', '{"runs": [{"budget": "1"}]}', '{"runs": 3}'):
        (tmp_path / "runs.json").write_text(damaged)
        assert "runs.json is damaged" in refusal(capsys, "report", tmp_path)
    trace = tmp_path / "trace.json"
    assert "would overwrite" in refusal(capsys, "report", trace, "--json", trace)
    assert "profile --help" in refusal(capsys) and "PATH" in refusal(capsys, "report")


def test_a_trace_alone_has_a_timeline_and_no_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"name": "decode", "cat": "bpkv", "ph": "X", "pid": 1, "tid": 1, "ts": 10, "dur": 5, "args": {}}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    assert main(["profile", "report", str(tmp_path / "trace.json"), "--plot", str(tmp_path / "p")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["range", "count", "total-ms", "self-ms", "nested-ms", "share", "p50-ms", "p99-ms",
                                "payload", "kernels-ms"]  # fmt: skip
    assert lines[3].split() == ["decode", "1", "0.005", "0.005", "0.000", "100.0%", "0.005", "0.005", "0", "0.000"]
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["timeline.png"]


def test_a_session_does_not_write_over_one_that_came_before_its_end(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "both", session.run_session

    def beside_another(*asked: Any) -> Any:
        folder.mkdir()
        (folder / "runs.json").write_text("theirs")
        return run(*asked)

    monkeypatch.setattr(session, "run_session", beside_another)
    assert "both is not empty, and is left as it is" in refusal(capsys, "run", profile, "--output", folder)
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("runs.json", "theirs")]


def test_pictures_of_others_stay_and_ours_are_drawn_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"name": "decode", "cat": "bpkv", "ph": "X", "pid": 1, "tid": 1, "ts": 10, "dur": 5, "args": {}}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    pictures = tmp_path / "p"
    report = ["report", str(tmp_path / "trace.json"), "--plot", str(pictures)]
    assert main(["profile", *report]) == 0
    drawn = (pictures / "timeline.png").read_bytes()
    assert main(["profile", *report]) == 0 and (pictures / "timeline.png").read_bytes() == drawn
    theirs = io.BytesIO()
    Figure().savefig(theirs)
    (pictures / "timeline.png").unlink()
    for content in (b"", b"mine", drawn[:20], theirs.getvalue()):
        for name in ("timeline.png", "load_against_budget.png"):
            (pictures / name).write_bytes(content)
            assert f"{name} is there and was not drawn by bpkv" in refusal(capsys, *report)
            assert [(path.name, path.read_bytes()) for path in pictures.iterdir()] == [(name, content)]
            (pictures / name).unlink()
    (pictures / "mine.png").write_bytes(b"mine")
    assert main(["profile", *report]) == 0 and (pictures / "timeline.png").read_bytes() == drawn
