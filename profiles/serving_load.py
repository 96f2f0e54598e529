"""What an eviction policy does for a server under load: the same requests against pools of equal bytes.

    PYTHONPATH=. python profiles/serving_load.py --output FILE

starts the real server (build_scripts/triton_environment.py) with the OpenAI-style front before it, once for each arm,
and has aiperf (build_scripts/aiperf_environment.py) ask and measure. The pool has room for 8 requests of which nothing
is evicted. Answers go on past the model's own end, so that all are equally long. Ratios are those of one run; look at
no single time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bpkv_trt.cli import main as bpkv
from bpkv_trt.documents import SCHEMA_VERSION, library_versions, machine, write_json
from bpkv_trt.models.loading import load_model
from bpkv_trt.models.source import ModelSource
from bpkv_trt.runtime.memory import pool_bytes
from build_scripts.recall_text import recall_prompt
from tests.serving.front import Front
from tests.serving.triton_server import ROOT, TritonServer

FITTING = 8  # requests whose full caches the pool holds
ARMS = {
    "full": ["--policy", "full"],
    "snapkv 0.2": ["--policy", "snapkv", "--budget", "0.2", "--regime", "prefill"],
    "bpkv 0.2": ["--budget", "0.2", "--regime", "prefill"],
}
MEASURED = {  # by aiperf, in its units
    "output_token_throughput": ("avg",),  # tokens of all requests per second
    "time_to_first_token": ("p50", "max"),  # ms
    "inter_token_latency": ("p50", "max"),  # ms, the mean of a request
    "request_latency": ("p50", "max"),  # ms
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "tests" / "assets" / "tiny-llama"))
    parser.add_argument("--prompt-tokens", type=int, default=1960, help="about, of build_scripts/recall_text.py")
    parser.add_argument("--new-tokens", type=int, default=40, help="of every answer")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=48, help="requests that are asked at once")
    parser.add_argument("--chunk-tokens", type=int, help="as of `bpkv model-repository` (a whole prompt)")
    parser.add_argument("--page-size", type=int, default=16, help="as of `bpkv model-repository`")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    triton, aiperf = environment("triton"), environment("aiperf")
    arms = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompt, size = write_inputs(folder, options)
        limits = ["--pool-size", f"{size // 1024}KiB", "--page-size", str(options.page_size), "--timeout-s", "7200"]
        limits += ["--chunk-tokens", str(options.chunk_tokens or prompt), "--queue-limit", str(options.concurrency)]
        for arm, policy in ARMS.items():
            with (
                served(folder, triton, options.model, [*limits, *policy]) as (server, front),
                watched(server) as running,
            ):
                found = measure(front, folder, aiperf, options)
            arms[arm] = {"most_running": max(running), **found}
            print(arm, arms[arm], flush=True)
    asked = {name: value for name, value in vars(options).items() if name != "output"}
    asked |= {"model": Path(options.model).name, "longest_prompt": prompt, "pool_bytes": size}
    content = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), "machine": machine(), "asked": asked}
    write_json(options.output, {**content, "arms": arms, "over_full": over_full(arms)})


def write_inputs(folder: Path, options: argparse.Namespace) -> tuple[int, int]:
    """The prompts; returns the tokens of the longest one, and the bytes that FITTING requests take."""
    loaded = load_model(options.model)
    prompts = [recall_prompt(7000 + seed, options.prompt_tokens)[0] for seed in range(options.requests)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
    longest = max(len(loaded.encoder.encode_raw(prompt)) for prompt in prompts)
    size = FITTING * pool_bytes(loaded, longest + options.new_tokens, options.page_size)
    return longest, -(-size // 1024) * 1024


@contextmanager
def served(folder: Path, triton: Path, model: str, options: list[str]) -> Iterator[tuple[TritonServer, Front]]:
    """The real server on all cores, and the front before it; triton: the Python beside which it is."""
    models, threads = folder / "models", str(os.cpu_count())
    made = bpkv(["model-repository", "--output", str(models), "--model", model, *options])
    assert made == 0, "the repository was not written"
    with TritonServer(triton.parent, models, folder / "log", OMP_NUM_THREADS=threads) as server:
        with Front(server.grpc) as front:
            yield server, front


def environment(name: str) -> Path:
    """The Python of another environment, made where it is missing."""
    script = ROOT / "build_scripts" / f"{name}_environment.py"
    made = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.strip())


@contextmanager
def watched(server: TritonServer) -> Iterator[list[int]]:
    """How many requests ran, as the server told twenty times a second: filled until the end of the block."""
    running, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            running.append(int(server.metrics().get("bpkv_running", 0)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield running
    finally:
        ended.set()
        watcher.join()


def measure(front: Front, folder: Path, aiperf: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What aiperf measures of all requests; SystemExit where one failed, or was answered with fewer tokens."""
    command = [str(aiperf.parent / "aiperf"), "profile", "--ui", "none", "--no-server-metrics"]
    command += ["--model", "bpkv", "--url", front.url.removesuffix("/v1"), "--endpoint-type", "completions"]
    command += ["--streaming", "--use-server-token-count", "--tokenizer", str(ModelSource(options.model).find())]
    command += ["--input-file", str(folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn"]
    command += ["--request-count", str(options.requests), "--concurrency", str(options.concurrency)]
    command += ["--warmup-request-count", "1", "--artifact-dir", str(folder / "aiperf")]
    command += ["--extra-inputs", json.dumps({"max_tokens": options.new_tokens, "ignore_eos": True})]
    # Offline, aiperf takes no tokenizer by its path either.
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, env=online, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"aiperf failed:\n{done.stdout[-4000:]}")
    lines = (folder / "aiperf" / "profile_export.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["metadata"]["benchmark_phase"] == "profiling"]
    tokens = [record["metrics"].get("usage_completion_tokens", {}).get("value") for record in records]
    if tokens != [options.new_tokens] * options.requests:
        sys.exit(f"Not {options.requests} answers of {options.new_tokens} tokens, but {tokens}: nothing was measured.")
    found = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    measured = {name: {statistic: found[name][statistic] for statistic in which} for name, which in MEASURED.items()}
    return {**measured, "aiperf_version": found["aiperf_version"]}


def over_full(arms: dict[str, Any]) -> dict[str, Any]:
    """Of every arm: what it has over what `full` has, its means and medians."""
    plain = {
        name: {"most_running": arm["most_running"], **{each: arm[each][which[0]] for each, which in MEASURED.items()}}
        for name, arm in arms.items()
    }
    return {name: {each: arm[each] / plain["full"][each] for each in arm} for name, arm in plain.items()}


if __name__ == "__main__":
    main()
