"""The real Triton Inference Server on a model repository, started as users start it: by runtime/launch.sh."""

import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "runtime" / "launch.sh"
START_S = 120.0  # it imports torch and loads a model, on a machine that may be busy
KEY = "the key of the tests"


class TritonServer:
    """Listens on free ports of this machine until the end of the `with` block."""

    def __init__(self, commands: Path, repository: Path, log: Path, launch: Path = LAUNCH, **environment: str) -> None:
        """commands: the folder that `tritonserver` is in. log: the file that all it prints goes to."""
        self.http, self.grpc, self.metrics_port = _free_ports(3)
        self.log = log
        ports = {"HTTP": self.http, "GRPC": self.grpc, "METRICS": self.metrics_port}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [launch, repository],
                preexec_fn=_heed_signals,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PATH": f"{commands}:{os.environ['PATH']}",
                    "OMP_NUM_THREADS": "1",
                    "BPKV_ADMIN_KEY": KEY,
                    **{f"BPKV_{name}_PORT": str(port) for name, port in ports.items()},
                    **environment,
                },
            )

    def __enter__(self) -> "TritonServer":
        self.wait_until_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:  # it listens for clients before it tells metrics
            try:
                for url in (f"{self.url}/v2/health/ready", self.metrics_url):
                    urllib.request.urlopen(url, timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.stop()
        raise AssertionError(f"the server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    def metrics(self) -> dict[str, float]:
        """Values of the bpkv_* families by name and labels as Prometheus writes them, without the model's."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            text = response.read().decode()
        lines = re.findall(r"^(bpkv_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
        return {name + _without_model(labels): float(value) for name, labels, value in lines}

    def metrics_when(self, name: str, value: float, within_s: float = 20.0) -> dict[str, float]:
        """The metrics once one of them has a value, and all that is published with it."""
        end = time.monotonic() + within_s
        while (found := self.metrics()).get(name) != value:
            assert time.monotonic() < end, f"{name} is {found.get(name)}, not {value}"
            time.sleep(0.05)
        return found

    def server_process(self) -> int:
        """The process of the server itself: the launcher's child."""
        (server,) = [child for child in _children(self.process.pid) if _name(child) == "tritonserver"]
        return server

    def model_process(self) -> int:
        """The process that runs the model: the server's child."""
        (model,) = [child for child in _children(self.server_process()) if _name(child) == "triton_python_b"]
        return model

    def shared_memory(self) -> list[Path]:
        """What this server keeps there, and nobody else."""
        return list(Path("/dev/shm").glob(f"bpkv{self.process.pid}_*"))

    def stop(self, wait_s: float = 60.0) -> int:
        """Ask it to end, as a service manager would; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def _heed_signals() -> None:
    """Of those that a process which was started in the background may have been told to ignore."""
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def _without_model(labels: str) -> str:
    rest = [label for label in labels.split(",") if not label.startswith("model=")]
    return "{" + ",".join(rest) + "}" if rest else ""


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _name(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()
