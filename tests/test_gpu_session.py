"""The session on a GPU, rehearsed on this CPU; and that its checks fail where a kernel is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.kernels.interpreter  # noqa: F401
from profiles.gpu_session import checks, floors, races, report, sanitizer, targets
from profiles.gpu_session.floors import Ceilings, Shape, Work
from profiles.gpu_session.part import Session
from profiles.gpu_session.runner import Part, run_together

ROOT = Path(__file__).resolve().parent.parent
LLAMA = Shape("Llama-3.1-8B", 32, 8, 128, 32, 8.03e9)


def session(*options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", str(ROOT / "profiles" / "gpu_session.sh"), *options]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command, env={**inherited, "PYTHON": sys.executable, **environment}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("session")
    done = session("--rehearse", "--seed", "7", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    (document,) = output.glob("*.json")
    assert (output / f"{document.stem}.md").read_text() in done.stdout
    return json.loads(document.read_text())


@pytest.mark.slow
def test_a_rehearsal_has_every_part_and_passes(rehearsal: dict[str, Any]) -> None:
    assert (rehearsal["schema_version"], rehearsal["seed"], rehearsal["rehearsal"]) == (1, 7, True)
    assert rehearsal["versions"]["torch"] == torch.__version__ and rehearsal["commit"]
    parts = rehearsal["parts"]
    assert list(parts) == [
        "checks", "kernel_tests", "races", "sanitizer", "ceilings", "kernel_times", "host_times",
    ]  # fmt: skip
    assert not any(part["problems"] for part in parts.values())
    assert [name for name, part in parts.items() if part["skipped"]] == ["sanitizer"]
    assert all(part["records"] for name, part in parts.items() if name != "sanitizer")
    checked = parts["checks"]["records"] + parts["races"]["records"]
    assert all(record["passed"] and record["error"] <= record["tolerance"] for record in checked)
    assert {record["case"] for record in parts["checks"]["records"]} >= set(map(checks.told, checks.CASES))
    kernels = {record["check"].partition(",")[0] for record in checked}
    assert kernels == {"lse", "score", "deletion", "nomination", "decode", "compact", "choose"}
    assert parts["kernel_tests"]["records"][0]["passed"] > 0


@pytest.mark.slow
def test_times_come_with_floors_and_targets(rehearsal: dict[str, Any]) -> None:
    parts = rehearsal["parts"]
    best = {kind: max(each["per_second"] for each in parts["ceilings"]["records"] if each["ceiling"] == kind)
            for kind in ("flops", "bytes")}  # fmt: skip
    for record in parts["kernel_times"]["records"]:
        floor = 1e3 * max(record["flops"] / best["flops"], record["bytes"] / best["bytes"])
        assert record["floor_ms"] == pytest.approx(floor) and record["reached"] == pytest.approx(floor / record["ms"])
    assert len(rehearsal["targets"]) == 6 and all(target["met"] in (True, False) for target in rehearsal["targets"])
    compared, *timed = parts["host_times"]["records"]
    assert compared["passed"] and compared["entries"][0] == compared["entries"][1]
    assert [each["pool"] for each in timed] == ["kernels", "torch"]
    for record in timed:
        assert set(record["compaction_s"]) == {"readout", "score", "select", "compact"}
        assert record["kept"] == pytest.approx(0.2, abs=0.01) and record["decode_kept_s"] > 0


def test_floors_are_those_counted_by_hand() -> None:
    # 32 query and 8 KV heads, D 128, 65,536 tokens: K of one layer is 128 MiB, its logits at 16 positions 8 GiFLOP.
    rows, logits = 134_217_728, 8_589_934_592
    assert floors.lse(LLAMA, 65536, 16) == Work(logits, rows)
    assert floors.score(LLAMA, 65536, 16, 32) == Work(283_467_841_536, 268_435_456)
    assert floors.score(LLAMA, 65536, 40, 1) == Work(42_949_672_960, 268_435_456)
    assert floors.deletion(LLAMA, 65536, 16) == Work(2 * logits + 2 * 6 * logits, 2 * rows)
    assert floors.nomination(LLAMA, 65536, 16) == Work(logits + 6 * logits, 2 * rows)
    assert floors.decode(LLAMA, 65536, 8) == Work(8_589_934_592, 2_147_483_648)
    assert floors.compact(LLAMA, 1000) == Work(0, 1000 * (1024 + 8))
    assert floors.prefill(LLAMA, 65536).flops == pytest.approx(1.0525e15 + 1.1259e15, rel=1e-4)
    machine = Ceilings(flops=800e12, bytes=4e12)
    assert machine.floor_ms(floors.score(LLAMA, 65536, 16, 32)) == pytest.approx(0.35433, rel=1e-4)
    assert machine.binds(floors.score(LLAMA, 65536, 16, 32)) == "products"
    assert machine.floor_ms(floors.decode(LLAMA, 65536, 8)) == pytest.approx(0.53687, rel=1e-4)
    assert machine.binds(floors.decode(LLAMA, 65536, 8)) == "bytes"


def test_targets_are_met_or_missed_by_what_was_timed() -> None:
    ceilings = [{"ceiling": "flops", "per_second": 800e12}, {"ceiling": "bytes", "per_second": 4e12}]

    def timed(kernel: str, ms: float, work: Work, batch: int = 1, **more: int) -> dict[str, Any]:
        return {"model": LLAMA.name, "kernel": kernel, "tokens": 65536, "batch": batch, "ms": ms,
                "flops": work.flops, "bytes": work.bytes} | more  # fmt: skip

    times = [
        timed("score, M 16, K 32", 1.0, floors.score(LLAMA, 65536, 16, 32)),  # 0.354 of the peak
        timed("compact", 2.0, Work(0, 5.5e9), layers=16),  # 0.6875 of the bandwidth; half of the layers
        timed("decode", 0.1, floors.decode(LLAMA, 65536, 1)),
        timed("decode", 0.8, floors.decode(LLAMA, 65536, 8), batch=8),
        timed("decode, a fifth", 0.19, floors.decode(LLAMA, 13107, 8), batch=8),
        timed("lse, M 16", 0.1, floors.lse(LLAMA, 65536, 16)),
        timed("deletion, M 16", 0.2, floors.deletion(LLAMA, 65536, 16)),
        timed("nomination, M 16", 0.2, floors.nomination(LLAMA, 65536, 16)),
        timed("rank", 5.0, floors.rank(1)),
    ]
    judged = targets.judged(ceilings, [*times, timed("choose 64 of 128", 1.3, Work(0, 1))])
    assert [target.met for target in judged] == [True, False, False, False, True, False]
    # 32 layers of lse, score, five deletions and a nomination are 73.6 ms, the rest 10.3, of 2,723 ms.
    assert judged[-1].value == pytest.approx((73.6 + 5 + 1.3 + 4) / 2723.0, rel=1e-3)
    assert [target.met for target in targets.judged(ceilings, times[1:])] == [None, False, False, False, True, None]
    assert all(target.met is None for target in targets.judged([], []))
    assert "not measured" in "\n".join(report.targets([target.record() for target in targets.judged([], [])]))


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose logits are too large by a thousandth."""
    return lambda *given, scale, **options: function(*given, scale=1.001 * scale, **options)


def moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compaction that takes the row before one of the kept ones."""

    def wrong(rows: torch.Tensor, *given: Any) -> None:
        rows = rows.clone()
        rows[len(rows) // 2 :][rows[len(rows) // 2 :].argmax()] -= 1
        function(rows, *given)

    return wrong


def dearest(function: Callable[..., Any]) -> Callable[..., Any]:
    """A choice that goes by the candidates' opposite values."""

    def wrong(pool: Any, *given: Any) -> Any:
        pool.values.neg_()
        return function(pool, *given)

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, fault, check",
    [
        ("log_sum_exp", scaled, "lse"),
        ("singleton_scores", scaled, "score"),
        ("deletion_statistics", scaled, "deletion"),
        ("nomination", scaled, "nomination"),
        ("paged_decode_attention", scaled, "decode"),
        ("compact", moved, "compact"),
        ("choose", dearest, "choose"),
    ],
)
def test_a_kernel_made_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, kernel: str, fault: Callable[..., Any], check: str, tmp_path: Path
) -> None:
    number = len(checks.CASES) if check == "choose" else 4  # fp32, the most exact
    run = Session(tmp_path / "unused.json", rehearse=True)
    torch.manual_seed(0)
    assert all(error <= allowed for _, (name, error, allowed) in checks.outcomes(number, run))
    monkeypatch.setattr(checks, kernel, fault(getattr(checks, kernel)))
    torch.manual_seed(0)
    failed = {name.partition(",")[0] for _, (name, error, allowed) in checks.outcomes(number, run) if error > allowed}
    assert check in failed


def test_a_row_that_is_not_packed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = races.Heads(races.TINY[0], torch.device("cpu"))
    kept = races.random_plan(3, 300, torch.device("cpu"))
    assert heads.wrong_rows(kept) == 0
    monkeypatch.setattr(races, "compact", moved(races.compact))
    assert heads.wrong_rows(kept) > 0


def test_an_output_that_is_not_written_is_an_error() -> None:
    with checks.poisoned_allocations():
        unwritten = torch.empty(3)
    assert checks.error_of(unwritten, torch.zeros(3, dtype=torch.float64), 1.0) == float("inf")
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_part_that_hangs_is_stopped_and_keeps_what_it_has_written(tmp_path: Path) -> None:
    hang = "import sys, time; open(sys.argv[-1], 'w').write('{\"records\": [{\"a\": 1}]}'); time.sleep(60)"
    fail = "import sys; sys.exit('no luck')"
    parts = [Part("hang", 3, [[sys.executable, "-c", hang]]), Part("fail", 30, [[sys.executable, "-c", fail]])]
    results = run_together(parts, tmp_path, 2, dict(os.environ))
    assert results["hang"].records == [{"a": 1}] and "stopped after" in results["hang"].problems[0]
    assert "exit status 1" in results["fail"].problems[0] and "no luck" in results["fail"].problems[0]
    assert results["hang"].seconds < 30


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.02)


def processes_of(folder: Path) -> list[int]:
    """Those whose command line names a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


@contextmanager
def started(command: list[str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A session that keeps its temporary folder in `folder`; none of its processes is left, whatever happens."""
    folder.mkdir()
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        for left in processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_rehearsal_that_is_ended(ending: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    script = str(ROOT / "profiles" / "gpu_session.sh")
    with started(["bash", script, "--rehearse", "--output", str(tmp_path / "results")], folder) as process:
        wait_for(lambda: processes_of(folder), 60)
        process.send_signal(ending)
        _, error = process.communicate(timeout=20)
        if ending == signal.SIGINT:
            assert (process.returncode, error) == (130, "interrupted; nothing was done\n")
            assert not processes_of(folder) and not any(folder.iterdir())
        wait_for(lambda: not processes_of(folder), 60)  # they look for their parent once torch is imported


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_session_keeps_what_was_done(ending: signal.Signals, tmp_path: Path) -> None:
    """With a part that starts a process of its own, and as many again that wait for their turn."""
    code = """
import sys
from profiles.gpu_session import __main__ as session
from profiles.gpu_session.runner import Part
record = "import sys; open(sys.argv[-1], 'w').write('{\\"records\\": [{\\"passed\\": true}]}')"
sleep = "import time; time.sleep(100)"
hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{sleep}', sys.argv[-1]])"
quick = Part("checks", 60, [[sys.executable, "-c", record]])
session.stages = lambda *_: iter([[quick], [Part("races", 60, 20 * [[sys.executable, "-c", hang]])]])
session.usable_cores = lambda: 3
sys.exit(session.main())
"""
    output, folder = tmp_path / "results", tmp_path / "temporary"
    with started([sys.executable, "-c", code, "--rehearse", "--output", str(output)], folder) as process:
        wait_for(lambda: len(processes_of(folder)) == 6, 60)
        process.send_signal(ending)
        _, error = process.communicate(timeout=20)
        assert not processes_of(folder) and not any(folder.iterdir())
    document = output / "gpu_session_rehearsal.json"
    assert (process.returncode, error) == (130, f"interrupted; what was done is in {document}\n")
    parts = json.loads(document.read_text())["parts"]
    assert list(parts) == ["checks"] and parts["checks"]["records"] == [{"passed": True}]


def test_the_memory_checker_is_stopped_at_its_cap_or_with_its_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "checker"
    program.write_text("#!/bin/sh\n[ $2 = memcheck ] && echo '========= bad' && exit 99\nexec tail -f \"$0\"\n")
    program.chmod(0o755)
    monkeypatch.setattr(sanitizer, "checker", lambda: str(program))
    run = Session(tmp_path / "found.json", seconds=sanitizer.RESERVE + 1)
    found, stopped = sanitizer.measure(run)
    assert (found["status"], found["passed"], found["said"]) == ("findings", False, ["========= bad"])
    assert (stopped["status"], stopped["passed"], stopped["said"]) == ("stopped at its cap", None, [])
    records = sanitizer.measure(run)
    assert next(records) == found | {"seconds": pytest.approx(0, abs=1)}
    records.close()  # type: ignore[attr-defined]
    wait_for(lambda: not processes_of(program), 10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_paragraph(tmp_path: Path) -> None:
    done = session("--output", str(tmp_path))
    looking, reason = done.stderr.splitlines()
    assert done.returncode == 2 and looking == "looking for a GPU ..." and "--rehearse" in reason
    assert not any(tmp_path.iterdir())
    done = session("--rehearse")
    assert done.returncode == 2 and "--output" in done.stderr


def test_a_library_named_tests_does_not_hide_our_helpers(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    code = "import profiles.gpu_session, tests.kernels.paged_caches as found; print(found.__file__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str(ROOT / "tests" / "kernels" / "paged_caches.py"), done.stderr


def test_without_pydantic_all_but_the_host_runs(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pydantic"] = None
from profiles.gpu_session import __main__, ceilings, checks, host_times, kernel_times, kernel_tests, races, sanitizer
from profiles.gpu_session.part import Missing
try:
    next(host_times.measure(None))
except Missing as reason:
    print(reason)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert "pydantic" in done.stdout, done.stderr
