"""Engines are built from end to end, down to the network, by processes that find packages in place of TensorRT-LLM."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bpkv_trt.errors import InputError
from bpkv_trt.kernels.compiled_kernels import CompiledKernels
from bpkv_trt.trtllm.projections import Projections
from bpkv_trt.trtllm.sidecar import FILE, KERNELS, EngineSidecar
from tests.trtllm.build_place import BuildPlace, save_checkpoint, save_library
from tests.trtllm.stock_build import FAILS

pytest.importorskip("triton", reason="compiles kernels")
# One kernel size of each kind, for one GPU: as little to compile as there can be.
SMALL = ["--plugin", "bpkv", "--bpkv_positions", "1", "--bpkv_top_k", "2", "--bpkv_targets", "80"]
# The network takes a minute to build.
SLOW = """
import inspect, pathlib, time
from tests.trtllm import stock_build

def build_model(*given, **named):
    pathlib.Path("building").touch()
    time.sleep(60)

build_model.__signature__ = inspect.signature(stock_build.build_model)
stock_build.build_model = build_model
stock_build.install()
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A library, and a cache that the first build fills."""
    folder = tmp_path_factory.mktemp("shared")
    return save_library(folder / "library"), folder / "cache"


@pytest.fixture
def place(tmp_path: Path, shared: tuple[Path, Path]) -> BuildPlace:
    return BuildPlace.make(tmp_path, *shared)


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_is_built_with_what_it_was_asked_for(place: BuildPlace, workers: int) -> None:
    """Of two ranks: by one process, or by one process each, which find settings, library and kernels."""
    checkpoint = save_checkpoint(place.folder / "checkpoint", ranks=2)
    stock = ["--checkpoint_dir", checkpoint, "--output_dir", "engine", "--workers", workers, "--gemm_plugin", "auto"]
    out = succeeded(place.run(*stock[:4], *SMALL, *stock[4:], "--bpkv-budget", "30%", "--tokens_per_block", "64"))
    assert f"settings are in {Path('engine') / FILE}" in out

    sidecar = EngineSidecar.read(place.folder / "engine")
    config = sidecar.settings.config
    assert (config.positions, config.top_k, config.page_size, str(config.budget)) == (1, 2, 64, "30%")
    assert (config.scope, config.readout, config.lookahead, config.rehearsal) == ("head", "direct", 0, 0)
    assert sidecar.settings.targets == ("80",)
    assert sidecar.versions["tensorrt"] == "10.14.1" and sidecar.versions["tensorrt_llm"] == "1.2.1"
    stored = json.loads((place.folder / "engine" / "config.json").read_text())["pretrained_config"]
    assert stored["bpkv"] == sidecar.settings.document() and stored["architecture"] == "LlamaForCausalLM"

    engines = [place.engine(rank, "engine") for rank in range(2)]
    assert {engine["class"] for engine in engines} == {"bpkv_trt.trtllm.models.BpkvLlamaForCausalLM"}
    assert all(engine["weights"] for engine in engines)
    told = engines[0]["told"]
    assert told[1:-4] == [*map(str, stock), "--tokens_per_block", "64"], "in order, and nothing of ours"
    assert (told[-4], told[-2:]) == ("--model_cls_file", ["--model_cls_name", "BpkvLlamaForCausalLM"])
    processes = {engine["process"] for engine in engines}
    registered = [int(line.split()[0]) for line in (place.folder / "registry").read_text().splitlines()]
    assert len(processes) <= workers and processes <= set(registered)
    assert len(set(registered)) == (1 if workers == 1 else 1 + len(processes)), "the command itself checks it first"
    bundles = list((place.cache / "kernels").iterdir())
    assert [path.suffix for path in bundles] == [".bundle"] * 2, "the engine's and its session's, for all processes"

    kernels = CompiledKernels.read(place.folder / "engine" / KERNELS)
    assert kernels.targets == ("80",)
    for rank in range(2):
        weights = load_file(checkpoint / f"rank{rank}.safetensors")
        kept = Projections.load(place.folder / "engine", rank, torch.device("cpu")).layers
        names = [f"transformer.layers.{layer}.attention.dense.weight" for layer in range(len(kept))]
        assert set(names) == weights.keys() and all(map(torch.equal, kept, map(weights.get, names)))
    (place.folder / "engine" / KERNELS).unlink()
    with pytest.raises(InputError, match="lacks bpkv_kernels.bundle: copy all files of one build"):
        EngineSidecar.read(place.folder / "engine")

    assert place.left_over() == [] and not Path(told[-3]).exists()


def test_a_model_without_weights_and_without_saving(place: BuildPlace) -> None:
    model = save_checkpoint(place.folder / "checkpoint") / "config.json"
    succeeded(place.run("--model_config", model, *SMALL))
    assert not place.engine()["weights"] and EngineSidecar.read(place.folder / "engine_outputs")
    succeeded(place.run("--model_config", model, *SMALL, "--dry_run", "--output_dir", "dry"))
    assert [*(place.folder / "dry").iterdir()] == []


def test_without_the_plugin_the_command_is_the_stock_one(place: BuildPlace) -> None:
    """Abbreviations included; even for a checkpoint and options that we refuse, and where there is no library."""
    checkpoint = save_checkpoint(place.folder / "checkpoint", quantization={"quant_algo": "W8A8_SQ_PER_CHANNEL"})
    arguments = ["--checkpoint_dir", str(checkpoint), "--max_beam_width=4", "--log_l", "error"]
    succeeded(place.run(*arguments, BPKV_PLUGIN_PATH="absent"))
    engine = place.engine()
    assert engine["class"] == "tensorrt_llm.models.llama.model.LLaMAForCausalLM"
    assert engine["told"] == ["trtllm-build", *arguments]
    assert engine["environment"].keys() == {"BPKV_CACHE_DIR", "BPKV_PLUGIN_PATH"}
    assert not (place.folder / "engine_outputs" / FILE).exists() and not (place.folder / "registry").exists()

    wrong = place.run("--checkpoint_dri", "x")
    assert wrong.returncode == 2 and "trtllm-build: error: unrecognized arguments: --checkpoint_dri x" in wrong.stderr


def test_a_build_that_fails_leaves_no_sidecar(place: BuildPlace) -> None:
    checkpoint = save_checkpoint(place.folder / "checkpoint", ranks=2)
    command = ["--checkpoint_dir", checkpoint, *SMALL]
    succeeded(place.run(*command))
    assert (place.folder / "engine_outputs" / FILE).exists()
    done = place.run(*command, **{FAILS: "1"})
    assert done.returncode == 1 and "RuntimeError: out of memory" in done.stderr, "as the stock command fails"
    assert not (place.folder / "engine_outputs" / FILE).exists()
    succeeded(place.run(*command))
    done = place.run(*command, **{FAILS: "0"})
    assert done.returncode == 1 and EngineSidecar.read(place.folder / "engine_outputs"), "the old engine is untouched"
    done = place.run(*command, "--workers", "2", "--output_dir", "other", **{FAILS: "1"})
    assert done.returncode == 1 and "Engine building failed" in done.stderr
    assert not (place.folder / "other" / FILE).exists() and place.left_over() == []


def test_what_is_wrong_with_the_options_is_told_by_the_stock_command(place: BuildPlace) -> None:
    checkpoint = save_checkpoint(place.folder / "checkpoint")
    done = place.run("--checkpoint_dir", checkpoint, *SMALL, "--max_batch_sizes", "many")
    assert done.returncode == 2 and "trtllm-build: error: unrecognized arguments" in done.stderr
    assert not (place.folder / "engine_outputs").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_leaves_nothing(place: BuildPlace, workers: int) -> None:
    """As a terminal sends it, to all processes of the job, while the network is built."""
    (place.folder / "packages" / "tensorrt_llm" / "__init__.py").write_text(SLOW)
    checkpoint = save_checkpoint(place.folder / "checkpoint", ranks=2)
    command = ["--checkpoint_dir", checkpoint, *SMALL, "--output_dir", "new", "--workers", str(workers)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bpkv_trt.trtllm.build", *command],
        cwd=place.folder,
        env=place.environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not (place.folder / "building").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    assert any(name.startswith("bpkv-build-") for name in place.left_over())
    os.killpg(process.pid, signal.SIGINT)
    told = process.communicate()[1].splitlines()
    assert (told[-1], process.returncode) == ("bpkv-trtllm-build: interrupted.", 130)
    assert len(told) == 1 or workers == 2, "processes that the stock command starts say so themselves"
    assert place.left_over() == [] and [*(place.folder / "new").iterdir()] == []
