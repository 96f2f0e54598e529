"""Compile the Triton kernels ahead of time: a folder of cubins, and a manifest that says what each takes.

    python build_scripts/compile_kernels.py --targets 80,90a --output out/kernels

Needs torch and Triton, no GPU. What the folder's manifest has already is not compiled again; equal sources give equal
bytes. Grids, scratch tensors and the order of launches are those of the launchers in bpkv_trt/kernels.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # nothing of this package need be installed

from bpkv_trt.documents import usable_cores
from bpkv_trt.errors import BpkvError, ConfigError, InputError
from bpkv_trt.kernels.compiler import check_compiler

if TYPE_CHECKING:
    from bpkv_trt.kernels.aot import Cubin
    from bpkv_trt.kernels.configuration import KernelConfiguration
    from bpkv_trt.progress import Progress

MOST_JOBS = 1024
COLUMNS = ("kernel", "target", "cubins", "registers", "shared bytes", "spilled bytes")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options.")


def parser() -> Parser:
    result = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    result.add_argument("--output", type=Path, required=True, metavar="DIR", help="made where it is missing")
    result.add_argument("--targets", metavar="LIST", help="such as 80,90a (default: all six)")
    result.add_argument("--jobs", type=int, metavar="N", help="processes (default: cores)")
    shape = result.add_argument_group("what for (defaults: Llama-3.1-8B)")
    for flag, default, text in (
        ("--query-heads", 32, ""),
        ("--kv-heads", 8, ""),
        ("--head-dim", 128, ""),
        ("--page-size", 32, "rows in a page, "),
        ("--positions", 16, "scoring positions of a sequence at most, "),
    ):
        shape.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}default {default}")
    shape.add_argument("--cache", choices=("fp32", "fp16", "bf16", "fp8e4m3", "int8"), default="bf16")
    shape.add_argument("--activations", choices=("fp32", "fp16", "bf16"), default="bf16")
    shape.add_argument("--shared-pages", action="store_true", help="TensorRT-LLM's blocks of all KV heads")
    shape.add_argument("--softcap", type=float, metavar="X", help="of attention logits (default: none)")
    readout = shape.add_mutually_exclusive_group()
    readout.add_argument("--logits", type=int, default=32, metavar="K", help="of the top-K readout, default 32")
    readout.add_argument("--probes", type=int, metavar="R", help="of a readout by probes, in place of it")
    return result


def configuration(options: argparse.Namespace) -> "KernelConfiguration":
    import torch

    from bpkv_trt.kernels.configuration import KernelConfiguration
    from bpkv_trt.kernels.paged import CacheType

    return KernelConfiguration(
        query_heads=options.query_heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        page_size=options.page_size,
        cache=CacheType(options.cache),
        activations={"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[options.activations],
        shared_pages=options.shared_pages,
        softcap=options.softcap,
        positions=options.positions,
        channels=options.logits if options.probes is None else options.probes,
        probes=options.probes is not None,
    )


def compile_kernels(options: argparse.Namespace) -> None:
    if options.jobs is not None and not 1 <= options.jobs <= MOST_JOBS:
        raise ConfigError(f"--jobs is {options.jobs}; give 1 to {MOST_JOBS}.")
    check_compiler()
    from bpkv_trt.kernels.aot import TARGETS, compile_all, parse_targets, variants_of
    from bpkv_trt.kernels.configuration import launches

    targets = list(TARGETS) if options.targets is None else parse_targets(options.targets)
    wanted = configuration(options)
    variants = variants_of(launches(wanted))
    make_directory(options.output)
    cubins = []
    with bars() as progress:
        if progress is not None:
            progress.stage("kernels", len(variants) * len(targets))
        jobs = options.jobs or usable_cores()
        for cubin in compile_all(variants, targets, options.output, jobs, wanted.document()):
            cubins.append(cubin)
            if progress is not None:
                progress.advance()
    for line in table(summary(cubins)):
        print(line)
    print(f"{len(cubins)} cubins and manifest.json in {options.output}")


def make_directory(path: Path) -> None:
    """Raises InputError where files could not be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()  # asking for permission answers wrongly for root
    except FileExistsError:
        raise InputError(f"The output {path} is a file; give a folder.") from None
    except OSError as error:
        raise InputError(f"The output {path} cannot be written to ({error.strerror}); give another folder.") from None


@contextmanager
def bars() -> "Iterator[Progress | None]":
    """Progress on a terminal, where the package that draws it is installed."""
    try:
        from rich.console import Console

        from bpkv_trt.progress import progress_on
    except ModuleNotFoundError:
        yield None
        return
    with progress_on(Console(stderr=True)) as progress:
        yield progress


def summary(cubins: "Iterable[Cubin]") -> Iterator[tuple[str, ...]]:
    """One row for each kernel and target: how many cubins, and the most that any of them takes."""
    ordered = sorted(cubins, key=lambda cubin: (cubin.name, int(cubin.target.rstrip("a"))))
    for (name, target), group in groupby(ordered, key=lambda cubin: (cubin.name, cubin.target)):
        same = list(group)
        most = [max(getattr(cubin, what) for cubin in same) for what in ("registers", "shared_bytes", "spilled_bytes")]
        yield name, f"sm_{target}", *map(str, (len(same), *most))


def table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [COLUMNS, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        words = [word.ljust(width) for word, width in zip(line[:2], widths[:2], strict=True)]
        numbers = [word.rjust(width) for word, width in zip(line[2:], widths[2:], strict=True)]
        yield "  ".join(words + numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        compile_kernels(parser().parse_args(arguments))
    except BpkvError as error:
        print("compile_kernels: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"compile_kernels: the output cannot be written ({error.strerror}); free space.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compile_kernels: interrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
