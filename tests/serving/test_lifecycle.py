"""The real server from its start to its end, wanted or not: what is wrong with a repository, SIGTERM, kill -9."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
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


SETTINGS, CODE, DESCRIPTION = Path("1", "model.yaml"), Path("1", "model.py"), Path("config.pbtxt")
# What is done to a file, as a pattern and what takes the place of what it matches; what the server says then.
DAMAGES = {
    "settings": (SETTINGS, ".+", "model: [", "is not valid YAML"),
    "no page": (SETTINGS, "pool_bytes: .*?$", "pool_bytes: 100", "less than one page"),
    "no memory": (SETTINGS, "pool_bytes: .*?$", "pool_bytes: 99999999999999999", "MiB are free on cpu"),
    "another model": (SETTINGS, "tiny-llama", "no-llama", "There is no model at"),
    "letters": (SETTINGS, "tiny-llama", "ünï-llama", "with letters beyond ASCII"),
    "code": (CODE, ".+", "def", "SyntaxError|invalid syntax"),
    "no code": (CODE, ".+", None, "model.py is missing"),
    "unknown field": (DESCRIPTION, ".+", 'name: "bpkv" backend: "python" colour: "red"', "colour"),
    "empty": (DESCRIPTION, ".+", "", "differs at its input bpkv_budget"),
    "one less": (DESCRIPTION, r"^ *\{ name: .bpkv_policy.*?\n", "", "differs at its input bpkv_policy"),
    "another type": (DESCRIPTION, "TYPE_UINT64", "TYPE_INT64", "differs at its input sampling_param_seed"),
    "needed": (DESCRIPTION, " optional: true }, #", " }, #", "differs at its input text_input"),
    "no output": (DESCRIPTION, '"finish_reason"', '"finished"', "differs at its output finish"),
    "two": (DESCRIPTION, "count: 1", "count: 2", "more than one instance"),
    "coupled": (DESCRIPTION, "decoupled: true", "decoupled: false", "no decoupled: true"),
    "batches": (DESCRIPTION, "max_batch_size: 0", "max_batch_size: 4", "max_batch_size other than 0"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_repository_ends_the_server_with_the_reason(
    tritonserver: Path, repository: Path, tmp_path: Path, name: str
) -> None:
    file, pattern, put, told = DAMAGES[name]
    path = repository / "bpkv" / file
    content, found = re.subn(pattern, put or "", path.read_text(), count=1, flags=re.MULTILINE | re.DOTALL)
    assert found == 1
    path.unlink() if put is None else path.write_text(content)
    server = TritonServer(tritonserver, repository, tmp_path / "log")
    assert server.process.wait(120) in (1, 2)
    log = (tmp_path / "log").read_text(errors="replace")
    assert any(part in log for part in told.split("|")), log[-3000:]
    assert not server.shared_memory()


def test_launching_says_what_is_missing(tmp_path: Path, repository: Path) -> None:
    with_blanks = shutil.copytree(repository, tmp_path / "with blanks")
    with_letters = shutil.copytree(repository, tmp_path / "ünï")
    path = {"PATH": os.environ["PATH"]}
    for arguments, environment, told in (
        ([], path, "give a repository: "),
        ([tmp_path], path, "holds no model; write one with: bpkv model-repository"),
        ([with_blanks], path, "Triton starts no model"),
        ([with_letters], path, "Triton starts no model"),
        ([repository], {"PATH": "/usr/bin:/bin"}, "there is no tritonserver on PATH"),
        ([repository], {**path, "BPKV_HTTP_PORT": "http"}, "BPKV_HTTP_PORT is http; give a port"),
        ([repository], {**path, "BPKV_GRPC_PORT": "0"}, "BPKV_GRPC_PORT is 0; give a port"),
        ([repository], {**path, "BPKV_METRICS_PORT": "99999"}, "BPKV_METRICS_PORT is 99999; give a port"),
        ([repository], {**path, "BPKV_EXIT_TIMEOUT_S": "-1"}, "BPKV_EXIT_TIMEOUT_S is -1; give a whole number"),
    ):
        done = subprocess.run([LAUNCH, *arguments], env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1


def test_the_doctor_finds_the_server(tritonserver: Path) -> None:
    path = {**os.environ, "PATH": f"{tritonserver}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "bpkv_trt", "doctor"]
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=300)
    assert f"Triton server: ok: {tritonserver / 'tritonserver'}\n" in done.stdout


def test_a_server_is_started_from_any_folder(
    tritonserver: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by a link to the launcher."""
    monkeypatch.chdir(repository.parent)
    (tmp_path / "start").symlink_to(LAUNCH)
    with TritonServer(tritonserver, Path(repository.name), tmp_path / "log", tmp_path / "start") as server:
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


@pytest.mark.parametrize("sent", [signal.SIGHUP, signal.SIGQUIT], ids=lambda sent: sent.name)
def test_other_signals_end_the_server_too(serve: Serve, tmp_path: Path, sent: signal.Signals) -> None:
    trace = tmp_path / "trace.json"
    with serve("--pool-size", "16MiB", "--trace", str(trace)) as server:
        processes = server.server_process(), server.model_process()
        server.process.send_signal(sent)
        assert server.process.wait(60) == 0 and trace.exists()
        assert not any(map(is_alive, processes)) and not server.shared_memory()


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
    (repository / "bpkv" / CODE).unlink()  # and what was damaged meanwhile is written again by the same command
    assert main(["model-repository", "--output", str(repository), "--model", str(TINY), "--budget", "0.3"]) == 0
    with TritonServer(tritonserver, repository, tmp_path / "log") as again:
        assert generate(again, TEXT, bpkv_raw=True, sampling_param_max_tokens=5).text == alone(TEXT, "0.3", 5)[0]
