"""The real server from its start to its end, wanted or not: what is wrong with a repository, SIGTERM, kill -9."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bpkv_trt.cli import main
from build_scripts.recall_text import induction_prompt, recall_prompt
from tests.serving.alone import alone
from tests.serving.clients import Refused, generate, generate_stream, post
from tests.serving.conftest import TINY, Serve
from tests.serving.triton_server import LAUNCH, TritonServer

TEXT = recall_prompt(11, 300)[0]
ENDLESS = induction_prompt(1, 60)[0]  # what is answered to it goes on until it is ended
DIED = 70


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    assert main(["model-repository", "--output", str(folder), "--model", str(TINY), "--pool-size", "16MiB"]) == 0
    return folder


def damage_settings(folder: Path) -> None:
    (folder / "bpkv" / "1" / "model.yaml").write_text("model: [")


def want_too_little(folder: Path) -> None:
    settings = folder / "bpkv" / "1" / "model.yaml"
    settings.write_text(settings.read_text().replace("16777216", "100"))


def move_the_model(folder: Path) -> None:
    settings = folder / "bpkv" / "1" / "model.yaml"
    settings.write_text(settings.read_text().replace("tiny-llama", "no-llama"))


def damage_code(folder: Path) -> None:
    (folder / "bpkv" / "1" / "model.py").write_text("def")


def damage_description(folder: Path) -> None:
    (folder / "bpkv" / "config.pbtxt").write_text('name: "bpkv" backend: "python" colour: "red"')


def lose_code(folder: Path) -> None:
    (folder / "bpkv" / "1" / "model.py").unlink()


DAMAGES = [
    (damage_settings, "is not valid YAML"),
    (want_too_little, "pool"),
    (move_the_model, "There is no model at"),
    (damage_code, "SyntaxError|invalid syntax"),
    (damage_description, "colour"),
    (lose_code, "model.py is missing"),
]


@pytest.mark.parametrize("damage, told", DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_repository_ends_the_server_with_the_reason(
    tritonserver: Path, repository: Path, tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(repository)
    server = TritonServer(tritonserver, repository, tmp_path / "log")
    assert server.process.wait(120) in (1, 2)
    log = (tmp_path / "log").read_text(errors="replace")
    assert any(part in log for part in told.split("|")), log[-3000:]
    assert not server.shared_memory()


def test_launching_says_what_is_missing(tmp_path: Path, repository: Path) -> None:
    for folder, path, told in (
        (tmp_path, os.environ["PATH"], "holds no model; write one with: bpkv model-repository"),
        (repository, "/usr/bin:/bin", "there is no tritonserver on PATH"),
    ):
        done = subprocess.run([LAUNCH, folder], env={"PATH": path}, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1


def test_a_server_is_started_from_any_folder(
    tritonserver: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    with TritonServer(tritonserver, Path(repository.name), tmp_path / "log") as server:
        assert (
            generate(server, TEXT, bpkv_raw=True, bpkv_budget="1", sampling_param_max_tokens=6).text
            == alone(TEXT, "1", 6)[0]
        )


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(serve: Serve) -> None:
    with serve("--budget", "0.5", "--pool-size", "16MiB") as server, ThreadPoolExecutor(4) as pool:
        asked = {"bpkv_raw": True, "bpkv_policy": "snapkv", "sampling_param_max_tokens": 400}
        running = [pool.submit(client, server, ENDLESS, **asked) for client in (generate, generate, generate_stream)]
        server.metrics_when("bpkv_running", 3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert not any(each.done() for each in running), "they are to end after the signal"
        with pytest.raises((Refused, OSError)):
            generate(server, TEXT)
        answers = [each.result(60).text for each in running]
        assert set(answers) == {alone(ENDLESS, "0.5", 400, "snapkv")[0]}
        assert server.process.wait(60) == 0
        assert not server.shared_memory()


@pytest.mark.parametrize("frozen", [False, True], ids=["runs", "hangs"])
def test_sigterm_does_not_wait_for_ever(serve: Serve, frozen: bool) -> None:
    """A request that takes longer than the exit timeout does not keep the server, nor does a model that hangs."""
    with serve("--pool-size", "16MiB", BPKV_EXIT_TIMEOUT_S="1") as server, ThreadPoolExecutor(1) as pool:
        body = {"text_input": ENDLESS, "bpkv_raw": True, "bpkv_policy": "snapkv", "sampling_param_max_tokens": 1900}
        endless = pool.submit(post, server, "generate", json.dumps(body).encode())
        server.metrics_when("bpkv_running", 1)
        model = server.model_process()
        if frozen:
            os.kill(model, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) != 0, "something was lost"
        assert not server.shared_memory() and not is_alive(model)
        with pytest.raises(OSError):
            endless.result(60)


def is_alive(process: int) -> bool:
    """Whether it still runs some seconds later."""
    end = time.monotonic() + 10
    while Path(f"/proc/{process}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    return Path(f"/proc/{process}").exists()


def test_a_killed_model_is_told_and_ends_the_server_to_be_started_again(
    tritonserver: Path, repository: Path, tmp_path: Path
) -> None:
    server = TritonServer(tritonserver, repository, tmp_path / "log")
    server.wait_until_ready()
    with ThreadPoolExecutor(1) as pool:
        body = json.dumps({"text_input": ENDLESS, "bpkv_raw": True, "sampling_param_max_tokens": 1900}).encode()
        running = pool.submit(post, server, "generate", body)
        server.metrics_when("bpkv_running", 1)
        os.kill(server.model_process(), signal.SIGKILL)
        beat = server.metrics()["bpkv_heartbeat_seconds"]
        with pytest.raises(Refused, match="not healthy") as refused:
            generate(server, TEXT)
        assert "Traceback" not in refused.value.message
        time.sleep(0.5)
        assert server.metrics()["bpkv_heartbeat_seconds"] == beat, "it stands still"
        assert server.process.wait(60) == DIED and not server.shared_memory()
        with pytest.raises(OSError):
            running.result(60)
    lose_code(repository)  # and what was damaged meanwhile is written again by the same command
    assert main(["model-repository", "--output", str(repository), "--model", str(TINY), "--budget", "0.3"]) == 0
    with TritonServer(tritonserver, repository, tmp_path / "log") as again:
        assert generate(again, TEXT, bpkv_raw=True, sampling_param_max_tokens=5).text == alone(TEXT, "0.3", 5)[0]
