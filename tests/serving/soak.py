"""Many short requests from several clients at once, some mistaken, some left half-way; every answer is checked.

    PYTHONPATH=. python tests/serving/soak.py --requests 10000

starts a server of its own (build_scripts/triton_environment.py) and prints what became of the requests, and the memory
that the server and the model's process hold after each fifth of them.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from bpkv_trt.cli import main as bpkv
from build_scripts.recall_text import recall_prompt
from tests.serving.alone import alone
from tests.serving.clients import Refused, generate, generate_stream, infer_stream
from tests.serving.triton_server import ROOT, TritonServer

KINDS = ("generate", "stream", "grpc", "leave", "mistake")
CASES = [
    (recall_prompt(seed, 60 + 40 * seed)[0], budget, tokens, policy)
    for seed, budget, policy in ((0, "0.5", "bpkv"), (1, "0.3", "snapkv"), (2, "0.6", "tova"), (3, "1", "full"))
    for tokens in (1, 6, 18)
]
FULL = "ask again later"
PARTS = 5  # the first one warms up what grows at first use: caches, arenas of threads
FLAT = 1.05  # times the memory after the first part, at the end


@dataclass(frozen=True)
class Outcome:
    """What became of a request: right, wrong, refused (a mistake), left, or failed."""

    kind: str
    case: tuple[str, str, int, str] | None = None
    text: str | None = None

    def checked(self) -> str:
        if self.case is None:
            return self.kind
        return "right" if self.text == alone(*self.case)[0] else "wrong"


def soak(server: TritonServer, requests: range, clients: int, seed: int) -> Counter[str]:
    """Run them, then count them by what became of them."""
    with ThreadPoolExecutor(clients) as pool:
        outcomes = list(pool.map(lambda number: _one(server, random.Random(f"{seed} {number}")), requests))
    return Counter(outcome.checked() for outcome in outcomes)


def memory(server: TritonServer) -> dict[str, int]:
    """Bytes that each process has made itself: not what is read from files, such as libraries, nor what is shared."""
    processes = {"server": server.server_process(), "model": server.model_process()}
    held = {name: psutil.Process(process).memory_info() for name, process in processes.items()}
    return {name: each.rss - each.shared for name, each in held.items()}


def _one(server: TritonServer, rng: random.Random) -> Outcome:
    case = text, budget, tokens, policy = rng.choice(CASES)
    asked = {
        "bpkv_raw": True,
        "bpkv_budget": budget,
        "bpkv_policy": policy,
        "sampling_param_max_tokens": tokens,
    }
    kind = rng.choice(KINDS)
    if kind == "leave":
        _leave(server, {"text_input": text, "streaming": True, **asked, "sampling_param_max_tokens": 500}, rng)
        return Outcome("left")
    if kind == "mistake":
        asked |= rng.choice([{"bpkv_budget": "7"}, {"sampling_param_max_tokens": 0}, {"bpkv_policy": "x"}])
    client = {"stream": generate_stream, "grpc": infer_stream}.get(kind, generate)
    while True:
        try:
            answered = client(server, text, **asked)
        except Refused as refused:
            if FULL not in refused.message:
                return Outcome("refused" if kind == "mistake" else "failed")
            time.sleep(0.05)
        else:
            return Outcome("wrong") if kind == "mistake" else Outcome("right", case, answered.text)


def _leave(server: TritonServer, inputs: dict[str, object], rng: random.Random) -> None:
    """Ask for a long stream, read a part of it or nothing, and close the connection."""
    body = json.dumps(inputs).encode()
    with socket.create_connection(("127.0.0.1", server.http), timeout=60) as client:
        head = f"POST /v2/models/bpkv/generate_stream HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        for _ in range(rng.randrange(4)):
            client.recv(4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    script = ROOT / "build_scripts" / "triton_environment.py"
    python = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        models, model = Path(folder, "models"), ROOT / "tests" / "assets" / "tiny-llama"
        arguments = ["model-repository", "--output", str(models), "--model", str(model), "--pool-size", "4MiB"]
        assert bpkv([*arguments, "--queue-limit", "4", "--most-running", "4"]) == 0
        with TritonServer(Path(python).parent, models, Path(folder, "log")) as server:
            begun, done, held = time.monotonic(), Counter[str](), []
            try:
                for part in range(PARTS):
                    requests = range(part * options.requests // PARTS, (part + 1) * options.requests // PARTS)
                    done += soak(server, requests, options.clients, options.seed)
                    left = server.metrics_when("bpkv_running", 0)
                    held.append(memory(server))
                    said = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in held[-1].items())
                    print(f"after {requests.stop}: {said}", flush=True)
            except Exception:
                print(server.log.read_text(errors="replace")[-4000:], file=sys.stderr)
                raise
            print(dict(done), f"{time.monotonic() - begun:.0f} s, pages live: {left['bpkv_pages_live']:.0f}")
    grown = [name for name, size in held[0].items() if held[-1][name] > FLAT * size]
    sys.exit(1 if grown or done["wrong"] or done["failed"] or left["bpkv_pages_live"] else 0)


if __name__ == "__main__":
    main()
