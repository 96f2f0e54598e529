"""Kernels compiled for an engine, in one block of bytes, and kept for the next one."""

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from bpkv_trt.documents import usable_cores, write_whole
from bpkv_trt.errors import InputError
from bpkv_trt.kernels.aot import compile_all, cubin_key, parse_targets, variants_of
from bpkv_trt.kernels.bundle import VERSION, checksum, pack, sealed, unsealed
from bpkv_trt.kernels.compiler import check_compiler
from bpkv_trt.kernels.configuration import KernelConfiguration
from bpkv_trt.kernels.launch import Launch
from bpkv_trt.user_directory import user_cache_directory


@dataclass(frozen=True)
class KernelBundle:
    """One configuration's kernels for some targets."""

    configuration: KernelConfiguration
    targets: tuple[str, ...]
    bundle: bytes = field(repr=False)

    @cached_property
    def checksum(self) -> int:
        return checksum(self.bundle)


Bundle = TypeVar("Bundle", bound=KernelBundle)


def compile_bundle(
    kind: type[Bundle],
    configuration: KernelConfiguration,
    launches: Iterable[Launch],
    targets: Sequence[str],
    cache: Path | None,
) -> Bundle:
    """What a configuration's launches need, compiled without a GPU, or what was left in `cache` by an earlier call.

    targets: keys of `kernels.aot.TARGETS`. cache: a folder, by default `kernels` in the user's cache directory. Other
    processes are started to compile, so that a script calls this under `if __name__ == "__main__":`. Raises ConfigError
    for unknown targets, BpkvError where nothing can be compiled, and InputError where the folder cannot be used.
    """
    check_compiler()
    targets = parse_targets(",".join(targets))
    variants = variants_of(launches)
    keys = [cubin_key(variant, target) for variant in variants for target in targets]
    name = hashlib.sha256("\n".join([str(VERSION), *keys]).encode()).hexdigest()[:32]
    folder = user_cache_directory() / "kernels" if cache is None else cache
    path = folder / f"{name}.bundle"
    try:
        bundle = _kept(path)
        if bundle is None:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = list(compile_all(variants, targets, Path(scratch), usable_cores()))
                made.sort(key=lambda cubin: cubin.file)  # they come as they are done
                bundle = pack(made, Path(scratch))
            write_whole(path, sealed(bundle))
    except OSError as error:
        raise InputError(
            f"The compiled kernels cannot be kept in {path} ({error.strerror}); remove what is there, or set "
            "BPKV_CACHE_DIR to a folder that can be written."
        ) from None
    return kind(configuration, tuple(targets), bundle)


def _kept(path: Path) -> bytes | None:
    """What an earlier call wrote; None where it is damaged, so that it is made again."""
    try:
        return unsealed(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
