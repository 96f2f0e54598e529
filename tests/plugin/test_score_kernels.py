"""Kernels compiled for an engine are kept, whole or not at all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bpkv_trt.errors import ConfigError
from bpkv_trt.kernels.aot import TARGETS
from bpkv_trt.trtllm.score_kernels import compile_score_kernels
from tests.plugin.configurations import CONFIGURATIONS, FP32
from tests.plugin.conftest import COMPILED, ROOT

AGAIN = """
import sys
from pathlib import Path
from bpkv_trt.errors import BpkvError
from bpkv_trt.trtllm import kernel_bundle, score_kernels
from tests.plugin.configurations import CONFIGURATIONS

if __name__ == "__main__":
    if sys.argv[2] == "never":
        kernel_bundle.compile_all = None
    try:
        kernels = score_kernels.compile_score_kernels(CONFIGURATIONS["fp16"], sys.argv[3].split(","), Path(sys.argv[1]))
        sys.stdout.buffer.write(kernels.bundle)
    except BpkvError as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def cache(bundle_files, tmp_path):
    """The folder that the bundles of these tests were compiled into, to be spoilt."""
    return shutil.copytree(bundle_files["fp16"].parent / "cache", tmp_path / "cache")


def again(folder, compiling, targets="90a"):
    script = folder.parent / "again.py"
    script.write_text(AGAIN)
    command = [sys.executable, script, folder, compiling, targets]
    return subprocess.run(command, env=COMPILED | {"PYTHONPATH": str(ROOT)}, capture_output=True)


def test_what_was_compiled_is_taken_and_what_is_damaged_is_compiled_again(cache, bundles):
    done = again(cache, "never", "sm_90a,90a")
    assert done.returncode == 0 and done.stdout == bundles["fp16"], done.stderr
    kept = next(path for path in cache.iterdir() if path.read_bytes().endswith(bundles["fp16"]))
    damaged = bytearray(kept.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    for content in (bytes(damaged), damaged[:100]):
        kept.write_bytes(content)
        assert again(cache, "never").returncode != 0, "it would have been compiled"
    done = again(cache, "compile")
    assert done.returncode == 0 and done.stdout == bundles["fp16"], done.stderr
    assert kept.read_bytes().endswith(bundles["fp16"]) and len(list(cache.iterdir())) == len(CONFIGURATIONS)


@pytest.mark.parametrize(
    "targets, said", [("75", "ConfigError: targets has 75"), ("", "ConfigError: targets is ''")], ids=repr
)
def test_targets_that_there_are_no_kernels_for(cache, targets, said):
    done = again(cache, "never", targets)
    assert done.returncode == 1 and done.stderr.decode().startswith(said)


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    done = again(tmp_path / "file", "never")
    assert done.returncode == 1 and b"InputError: The compiled kernels cannot be kept in" in done.stderr


def test_an_interpreter_compiles_nothing(tmp_path):
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set"):
        compile_score_kernels(FP32, tuple(TARGETS), tmp_path)


def test_the_library_knows_every_target_that_kernels_are_compiled_for(plugin):
    from bpkv_trt.trtllm.plugin_library import PluginLibrary

    assert PluginLibrary.find(Path(plugin)).sidecar.targets == list(TARGETS)
