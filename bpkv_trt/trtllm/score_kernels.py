"""The kernels that score inside an engine, compiled for it and kept for the next one."""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bpkv_trt.documents import usable_cores, write_whole
from bpkv_trt.errors import InputError
from bpkv_trt.kernels.aot import TARGETS, compile_all, parse_targets, variants_of
from bpkv_trt.kernels.bundle import VERSION, checksum, pack
from bpkv_trt.kernels.compiler import check_compiler
from bpkv_trt.kernels.configuration import KernelConfiguration, score_launches
from bpkv_trt.user_directory import user_cache_directory

DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class ScoreKernels:
    """One configuration's scoring kernels for some targets, as the plugin takes them."""

    configuration: KernelConfiguration
    targets: tuple[str, ...]
    bundle: bytes = field(repr=False)

    @cached_property
    def checksum(self) -> int:
        return checksum(self.bundle)


def compile_score_kernels(
    configuration: KernelConfiguration, targets: Sequence[str] = tuple(TARGETS), cache: Path | None = None
) -> ScoreKernels:
    """Compile, without a GPU, or take what an earlier call with equal kernels left in `cache`.

    targets: keys of `kernels.aot.TARGETS`. cache: a folder, by default `kernels` in the user's cache directory. Other
    processes are started to compile, so that a script calls this under `if __name__ == "__main__":`. Raises ConfigError
    for unknown targets, BpkvError where nothing can be compiled, and InputError where the folder cannot be used.
    """
    check_compiler()
    targets = parse_targets(",".join(targets))
    variants = variants_of(score_launches(configuration))
    keys = [variant.key(target) for variant in variants for target in targets]
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
            write_whole(path, hashlib.sha256(bundle).digest() + bundle)
    except OSError as error:
        raise InputError(
            f"The compiled kernels cannot be kept in {path} ({error.strerror}); remove what is there, or set "
            "BPKV_CACHE_DIR to a folder that can be written."
        ) from None
    return ScoreKernels(configuration, tuple(targets), bundle)


def _kept(path: Path) -> bytes | None:
    """What an earlier call wrote; None where it is damaged, so that it is made again."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, bundle = content[:DIGEST], content[DIGEST:]
    return bundle if hashlib.sha256(bundle).digest() == digest else None
