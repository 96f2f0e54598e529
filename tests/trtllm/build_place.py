"""Where `bpkv-trtllm-build` runs without TensorRT-LLM: packages that stand in, a plugin library, a checkpoint."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trtllm.stock_build import DEVICES, save_projections

ROOT = Path(__file__).resolve().parents[2]
# All there is of TensorRT: a version, and a registry whose plugins come from libraries that tell of it in a file.
TENSORRT = """
from types import SimpleNamespace
__version__ = "10.14.1"
def get_plugin_registry():
    return SimpleNamespace(get_creator=lambda name, version, namespace: None)
"""
LIBRARY = """
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
bool initBpkvPlugins(void *logger, char const *space) {
  FILE *file = fopen(getenv("STAND_IN_REGISTRY"), "a");
  fprintf(file, "%d %s\\n", (int)getpid(), space);
  fclose(file);
  return logger == NULL;
}
"""
MODEL = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def save_checkpoint(folder: Path, ranks: int = 1, **changed: object) -> Path:
    """As TensorRT-LLM's conversion leaves it; of the weights it has the output projections."""
    folder.mkdir(parents=True, exist_ok=True)
    config = MODEL | {"mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1}} | changed
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        save_projections(folder, rank, config["num_hidden_layers"], config["hidden_size"])
    return folder


def save_library(folder: Path, compiled: bool = True) -> Path:
    """A plugin library with its sidecar; one that is not compiled is found, but does not load."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "libbpkv_plugin.so"
    if compiled:
        if shutil.which("cc") is None:
            pytest.skip("needs a C compiler")
        (folder / "library.c").write_text(LIBRARY)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", path, folder / "library.c"], check=True)
    else:
        path.write_bytes(b"library")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    sidecar = {"schema_version": 1, "sha256": sha256, "abi": 1, "tensorrt": "10.14.1", "targets": ["80", "90a"]}
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    return path


@dataclass(frozen=True)
class BuildPlace:
    """A folder, and the processes that run in it."""

    folder: Path
    library: Path
    cache: Path

    @classmethod
    def make(cls, folder: Path, library: Path, cache: Path) -> "BuildPlace":
        package = folder / "packages" / "tensorrt_llm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from tests.trtllm.stock_build import install\n\ninstall()\n")
        (folder / "packages" / "tensorrt.py").write_text(TENSORRT)
        (folder / "tmp").mkdir()
        return cls(folder, library, cache)

    @property
    def environment(self) -> dict[str, str]:
        """Of processes that compile kernels, and find the packages that stand in, however they are started."""
        inherited = {name: each for name, each in os.environ.items() if not name.startswith(("BPKV_", "TRITON_"))}
        return inherited | {
            "PYTHONPATH": f"{self.folder / 'packages'}{os.pathsep}{ROOT}",
            "BPKV_CACHE_DIR": str(self.cache),
            "STAND_IN_REGISTRY": str(self.folder / "registry"),
            "TMPDIR": str(self.folder / "tmp"),
            "BPKV_PLUGIN_PATH": str(self.library),
            DEVICES: "2",
        }

    def run(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """The command."""
        return self.run_any(sys.executable, "-m", "bpkv_trt.trtllm.build", *arguments, **environment)

    def run_any(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, command)],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def engine(self, rank: int = 0, output: str = "engine_outputs") -> dict[str, object]:
        """What the engine of a rank tells."""
        return json.loads((self.folder / output / f"rank{rank}.engine").read_text())

    def left_over(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "tmp").iterdir())
