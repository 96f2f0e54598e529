"""Kernels compiled ahead of time, without a GPU: a folder of cubins, and a manifest of what each takes.

How they are launched, the grid, scratch tensors, initial values and order, is what the launchers in this package do.
"""

import hashlib
import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.language import constexpr
from triton.runtime import JITFunction

from bpkv_trt.documents import write_json
from bpkv_trt.errors import BpkvError, ConfigError
from bpkv_trt.kernels.launch import Launch
from bpkv_trt.kernels.variant import ALIGNMENT, UNALIGNED, WARP, Variant

TARGETS = {"80": 80, "86": 86, "89": 89, "90a": 90, "100a": 100, "120a": 120}  # by Triton's compute capability
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Cubin:
    """A kernel compiled for one target, as the manifest lists it."""

    name: str
    target: str  # such as 90a
    file: str
    sha256: str
    arguments: list[tuple[str, str]]  # name and Triton's type, in order
    hidden_arguments: int  # pointers that follow them and are null: Triton's scratch, which no kernel of ours uses
    constants: dict[str, Any]
    threads: int
    shared_bytes: int  # of dynamic shared memory
    registers: int  # of a thread
    spilled_bytes: int  # of a thread


def cubin_key(variant: Variant, target: str) -> str:
    """Equal where the cubins are: by Triton, the kernel's source and all it calls, and everything set here."""
    made_from = [triton.__version__, *_sources(_function(variant)), target, repr(variant), *variant.aligned]
    return hashlib.sha256("\n".join(made_from).encode()).hexdigest()


def compile_variant(variant: Variant, target: str) -> CompiledKernel:
    """Compile for a target of `TARGETS`; no GPU is needed."""
    function, types, constants = _function(variant), dict(variant.arguments), dict(variant.constants)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    places = {name: (place,) for place, name in enumerate(function.arg_names)}
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", ALIGNMENT]] for name in variant.aligned},
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return triton.compile(source, target=GPUTarget("cuda", TARGETS[target], WARP), options=options)


def variants_of(launches: Iterable[Launch]) -> list[Variant]:
    """What has to be compiled so that all of these can be launched, each once."""
    return list(dict.fromkeys(map(Variant.of, launches)))


def parse_targets(text: str) -> list[str]:
    """Read `80,90a`; raises ConfigError, naming the choices."""
    targets = [target.strip().removeprefix("sm_") for target in text.split(",") if target.strip()]
    if not targets:
        raise ConfigError(f"targets is {text!r}, which names none; choose from {', '.join(TARGETS)}.")
    if unknown := [target for target in targets if target not in TARGETS]:
        raise ConfigError(
            f"targets has {', '.join(unknown)}, which nothing is compiled for; choose from {', '.join(TARGETS)}."
        )
    return list(dict.fromkeys(targets))


def compile_all(
    variants: Sequence[Variant],
    targets: Sequence[str],
    output: Path,
    jobs: int,
    configuration: Mapping[str, Any] | None = None,
) -> Iterator[Cubin]:
    """Compile every variant for every target into `output`, in `jobs` processes; yields cubins as they are done.

    What the folder's manifest already has is not compiled again. The manifest, written last, lists exactly these, in
    the order of variants and targets, and the configuration that they are for. Other files stay as they are, unused.
    """
    output.mkdir(parents=True, exist_ok=True)
    known = {cubin.file: cubin for cubin in read_manifest(output)}
    wanted = {_file(variant, target): (variant, target) for variant in variants for target in targets}
    done = {file: known[file] for file in wanted if file in known and _intact(output, known[file])}
    yield from done.values()
    ignore_interrupts = (signal.SIGINT, signal.SIG_IGN)  # which this process answers alone
    executor = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignore_interrupts
    )
    try:
        waiting = [executor.submit(_compile, *wanted[file], output) for file in wanted if file not in done]
        for future in as_completed(waiting):
            cubin = future.result()
            done[cubin.file] = cubin
            yield cubin
    except BrokenProcessPool:
        raise BpkvError(
            "The processes that compile kernels ended before they were done: for want of memory, or because the script "
            'that asked for them does so outside `if __name__ == "__main__":`, which each of them runs again. Put it '
            "there, or compile with fewer jobs."
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "triton": triton.__version__,
        "alignment": ALIGNMENT,
        "unaligned": UNALIGNED,
        "configuration": configuration,
        "cubins": [asdict(done[file]) for file in wanted],
    }
    write_json(output / "manifest.json", manifest)


def read_manifest(folder: Path) -> list[Cubin]:
    """The cubins of a folder, none where it has no manifest. Raises ConfigError where it cannot be read."""
    path = folder / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA_VERSION:
            raise ConfigError(f"The manifest {path} is of another version; remove it and compile again.")
        return [Cubin(**{**cubin, "arguments": list(map(tuple, cubin["arguments"]))}) for cubin in content["cubins"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"The manifest {path} is damaged or cannot be read; remove it and compile again.") from None


def _function(variant: Variant) -> JITFunction:
    module, _, name = variant.kernel.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)


def _sources(function: JITFunction) -> Iterator[str]:
    # A kernel, the constants it names and all it calls. Triton's own key depends on what was asked for one before.
    yield function.src
    for name in function.fn.__code__.co_names:
        value = function.fn.__globals__.get(name)
        if isinstance(value, JITFunction):
            yield from _sources(value)
        elif isinstance(value, constexpr):
            yield f"{name} = {value.value}"


def _file(variant: Variant, target: str) -> str:
    return f"{variant.name}.sm_{target}.{cubin_key(variant, target)[:16]}.cubin"


def _intact(folder: Path, cubin: Cubin) -> bool:
    path = folder / cubin.file
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == cubin.sha256


def _compile(variant: Variant, target: str, output: Path) -> Cubin:
    triton.knobs.compilation.disable_line_info = True  # paths of the sources: two checkouts make equal cubins
    compiled = compile_variant(variant, target)
    binary, metadata = compiled.asm["cubin"], compiled.metadata
    assert metadata.global_scratch_size == metadata.profile_scratch_size == 0, "a launch would need scratch memory"
    file = _file(variant, target)
    (output / file).write_bytes(binary)
    registers, spilled = _resources(binary)
    return Cubin(
        name=metadata.name,
        target=target,
        file=file,
        sha256=hashlib.sha256(binary).hexdigest(),
        arguments=list(variant.arguments),
        hidden_arguments=_parameters(compiled.asm["ptx"]) - len(variant.arguments),
        constants={
            name: value if isinstance(value, int | float | None) else str(value) for name, value in variant.constants
        },
        threads=variant.threads,
        shared_bytes=metadata.shared,
        registers=registers,
        spilled_bytes=spilled,
    )


def _parameters(ptx: str) -> int:
    entry = re.search(r"\.entry\s+\w+\(([^)]*)\)", ptx)
    assert entry is not None, "the PTX has no entry"
    return entry[1].count(".param")


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as the tool that comes with Triton reads them off a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers is not None and stack is not None, "cuobjdump tells no resources"
    return int(registers[1]), int(stack[1])
