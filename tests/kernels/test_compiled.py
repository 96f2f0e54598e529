"""What the compiler makes of the kernels for every target, from cubins that are made once: no GPU is needed."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bpkv_trt.errors import ConfigError
from bpkv_trt.kernels.aot import TARGETS, Cubin, read_manifest, variants_of
from bpkv_trt.kernels.configuration import KernelConfiguration, Sizes, launch_all, launches
from bpkv_trt.kernels.launch import recorded
from bpkv_trt.kernels.paged import CacheType
from build_scripts.compile_kernels import main

ROOT = Path(__file__).resolve().parents[2]
SHARED_KIB = {"80": 163, "86": 99, "89": 99, "90a": 227, "100a": 227, "120a": 99}  # of a block, where it is asked for
MOST_REGISTERS = 255
HIDDEN = 2  # Triton 3.5: global and profile scratch
NOT_NEEDED = ("numpy", "nvtx", "pydantic", "rich", "safetensors", "transformers", "yaml")
SWEEP = """
import sys
from pathlib import Path
import torch
from bpkv_trt.kernels.aot import compile_all, variants_of
from bpkv_trt.kernels.configuration import KernelConfiguration, Sizes, launch_all
from bpkv_trt.kernels.launch import recorded
from bpkv_trt.kernels.paged import CacheType

FP32, FP16 = torch.float32, torch.float16
CASES = (
    (KernelConfiguration(head_dim=64, cache=CacheType.INT8, softcap=50.0, shared_pages=True), 8),
    (KernelConfiguration(head_dim=96, cache=CacheType.FP16, activations=FP16, query_heads=64), 16),
    (KernelConfiguration(cache=CacheType.FP8, probes=True, channels=1, positions=40), 40),
    (KernelConfiguration(cache=CacheType.FP32, activations=FP32), 16),
    (KernelConfiguration(head_dim=256, query_heads=16, softcap=30.0, positions=40), 40),
    (KernelConfiguration(head_dim=256, cache=CacheType.FP8, shared_pages=True, probes=True, channels=8), 1),
)

if __name__ == "__main__":
    with recorded() as notes:
        for configuration, positions in CASES:
            launch_all(configuration, Sizes(positions, splits=128))
    for _ in compile_all(variants_of(notes), ["80", "90a"], Path(sys.argv[1]), jobs=int(sys.argv[2])):
        pass
"""


def run(*command: str | Path, path: Path) -> str:
    """Output of a Python process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def jobs() -> str:
    return str(len(os.sched_getaffinity(0)))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """(cubins of the default configuration, cubins of a sweep, what the command printed)."""
    place = tmp_path_factory.mktemp("compiled")
    bare = place / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n")
    script = ROOT / "build_scripts" / "compile_kernels.py"
    printed = run(script, "--output", place / "default" / "made", "--jobs", jobs(), path=bare)
    (place / "sweep.py").write_text(SWEEP)
    run(place / "sweep.py", place / "sweep", jobs(), path=ROOT)
    return place / "default" / "made", place / "sweep", printed


def described(cubin: Cubin) -> str:
    return f"{cubin.name} for sm_{cubin.target} with {cubin.constants}: {cubin}"


@pytest.mark.slow
def test_no_kernel_spills_or_takes_what_its_target_has_not(folders: tuple[Path, Path, str]) -> None:
    cubins = [cubin for folder in folders[:2] for cubin in read_manifest(folder)]
    assert {cubin.target for cubin in read_manifest(folders[0])} == set(TARGETS)
    assert [described(cubin) for cubin in cubins if cubin.spilled_bytes] == []
    assert [described(cubin) for cubin in cubins if not 0 < cubin.registers <= MOST_REGISTERS] == []
    assert [described(cubin) for cubin in cubins if cubin.shared_bytes > SHARED_KIB[cubin.target] * 1024] == []
    # What one multiprocessor has for all threads of a program.
    assert [described(cubin) for cubin in cubins if cubin.registers * cubin.threads > 2**16] == []


@pytest.mark.slow
def test_a_cubin_takes_the_arguments_of_its_launch_and_two_nulls(folders: tuple[Path, Path, str]) -> None:
    cubins = read_manifest(folders[0])
    wanted = {(variant.name, variant.arguments) for variant in variants_of(launches(KernelConfiguration()))}
    for target in TARGETS:
        assert {(cubin.name, tuple(cubin.arguments)) for cubin in cubins if cubin.target == target} == wanted
    assert {cubin.hidden_arguments for cubin in cubins} == {HIDDEN}
    assert {path.name for path in folders[0].iterdir()} == {"manifest.json", *(cubin.file for cubin in cubins)}


@pytest.mark.slow
def test_a_cubin_has_one_name_whatever_is_compiled_beside_it(folders: tuple[Path, Path, str]) -> None:
    def by_contents(folder: Path) -> dict[str, tuple[str, str]]:
        return {repr(replace(cubin, file="", sha256="")): (cubin.file, cubin.sha256) for cubin in read_manifest(folder)}

    default, sweep = map(by_contents, folders[:2])
    both = default.keys() & sweep.keys()
    assert len(both) >= 4 and {key: default[key] for key in both} == {key: sweep[key] for key in both}


@pytest.mark.slow
def test_the_command_sums_up_what_it_compiled(folders: tuple[Path, Path, str]) -> None:
    cubins = read_manifest(folders[0])
    header, *rows, last = folders[2].splitlines()
    assert header.split() == ["kernel", "target", "cubins", "registers", "shared", "bytes", "spilled", "bytes"]
    assert len(rows) == len({(cubin.name, cubin.target) for cubin in cubins})
    scores = [cubin for cubin in cubins if (cubin.name, cubin.target) == ("score_entries", "90a")]
    most = [max(getattr(cubin, what) for cubin in scores) for what in ("registers", "shared_bytes", "spilled_bytes")]
    assert ["score_entries", "sm_90a", str(len(scores)), *map(str, most)] in [row.split() for row in rows]
    assert last.startswith(f"{len(cubins)} cubins")


@pytest.mark.parametrize(
    "configuration",
    [
        KernelConfiguration(),
        KernelConfiguration(positions=40, probes=True, channels=8, shared_pages=True, softcap=30.0),
        KernelConfiguration(query_heads=28, kv_heads=4, head_dim=96, positions=5),
    ],
    ids=str,
)
def test_one_set_of_cubins_serves_every_size(configuration: KernelConfiguration) -> None:
    known = set(variants_of(launches(configuration)))
    for positions in range(1, configuration.positions + 1):
        with recorded() as notes:
            launch_all(
                configuration,
                Sizes(positions, 3 * positions, sequences=positions % 3 + 1, tokens=10 ** (positions % 7)),
            )
        assert set(variants_of(notes)) <= known


class Allocated(TorchDispatchMode):
    """Sums the bytes of all tensors that are made, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(options or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((arguments, options)) if torch.is_tensor(each)}
        made = (each for each in tree_leaves(result) if torch.is_tensor(each))
        self.bytes += sum(each.nbytes for each in made if each.untyped_storage()._cdata not in given)
        return result


def allocated(call: Callable[[], object]) -> int:
    with Allocated() as allocated, recorded():
        call()
    return allocated.bytes


@pytest.mark.parametrize("shape", [{}, {"probes": True, "channels": 8, "shared_pages": True}], ids=str)
def test_no_launcher_takes_memory_that_grows_with_the_square_of_the_tokens(shape: dict[str, object]) -> None:
    configuration = KernelConfiguration(**shape)

    def taken(tokens: int) -> int:
        return allocated(lambda: launch_all(configuration, Sizes(16, min(128, tokens // 256), tokens=tokens)))

    assert taken(2**13) < taken(2**14) <= 2 * taken(2**13)
    assert taken(2**16) < taken(2**17) <= 2 * taken(2**16)
    assert allocated(lambda: torch.zeros(2**14, 2**14, device="meta").view(-1)) == 2**30, "a square would be seen"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"kv_heads": 0}, "kv_heads is 0; give 1 or more"),
        ({"kv_heads": 5}, "query_heads is 32 with 5 KV heads"),
        ({"query_heads": 130, "kv_heads": 2}, "at most 64 times as many"),
        ({"head_dim": 100}, "head_dim is 100; give a multiple of 8 from 16 to 256"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"channels": 1000}, "channels is 1000; give at most 128"),
        ({"positions": 2**20}, "numbers; give fewer of one of them"),
        ({"head_dim": 24, "cache": CacheType.INT8}, "head_dim is 24; give a multiple of 16 from 16 to 256"),
        ({"head_dim": 18, "cache": CacheType.FP32, "activations": torch.float32}, "give a multiple of 4"),
        ({"page_size": 2**20 + 1}, "page_size is 1048577; give at most 1048576"),
        ({"query_heads": 2**16, "kv_heads": 2**16}, "kv_heads is 65536; give at most 65535"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"softcap": 1e-4}, "softcap is 0.0001; give a number from 0.001, or none"),
        ({"softcap": 1e39}, "softcap is 1e"),
        ({"cache": CacheType.FP16}, "rounded to be multiplied with torch.bfloat16. Give --activations fp16"),
    ],
)
def test_what_has_no_kernels_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KernelConfiguration(**change)


def test_rows_of_16_bytes_have_kernels_in_every_type_of_cache() -> None:
    assert KernelConfiguration(head_dim=20, cache=CacheType.FP32, activations=torch.float32).document() == {
        "query_heads": 32,
        "kv_heads": 8,
        "head_dim": 20,
        "page_size": 32,
        "cache": "fp32",
        "activations": "fp32",
        "shared_pages": False,
        "softcap": None,
        "positions": 16,
        "channels": 32,
        "probes": False,
    }


@pytest.mark.parametrize(
    "options, said",
    [
        (["--targets", "80,75"], "targets has 75"),
        (["--targets", ","], "targets is ',', which names none; choose from 80"),
        (["--output", "FILE/folder"], "cannot be written to"),
        (["--output", "FILE"], "The output FILE is a file; give a folder"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--jobs", "1025"], "--jobs is 1025; give 1 to 1024"),
        (["--cache", "fp16"], "--activations fp16"),
        (["--head-dim", "7"], "head_dim is 7"),
        (["--softcap", "nan"], "softcap is nan"),
        (["--logits", "8", "--probes", "8"], "not allowed with argument"),
        (["--no-such-option"], "--help lists the options"),
    ],
)
def test_a_mistake_is_answered_with_one_paragraph(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["--output", "out", *options]) == 2
    answer = capsys.readouterr()
    assert said in answer.err and answer.err.count("\n") == 1 and not answer.out
    assert not (tmp_path / "out").exists()


def test_what_cannot_compile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert main(["--output", str(tmp_path)]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["--output", str(tmp_path)]) == 2
    assert "triton is not installed; install it with pip install 'bpkv-trt[kernels]'" in capsys.readouterr().err
