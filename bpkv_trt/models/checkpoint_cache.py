"""Dequantised checkpoints, kept as Hugging Face folders under the user's cache directory."""

import json
import logging
import shutil
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from bpkv_trt.errors import ModelError
from bpkv_trt.models.dequantise import dequantise
from bpkv_trt.models.gguf_file import GgufFile, sha256_of
from bpkv_trt.user_directory import user_cache_directory

FORMAT = 1  # raise when what is written changes; older folders are then ignored
MANIFEST = "bpkv_manifest.json"

log = logging.getLogger("bpkv_trt.models")


def cached_checkpoint(checkpoint: GgufFile) -> Path:
    """Folder with the dequantised weights of `checkpoint`, made on first use.

    Every file is hashed on every call (0.5 GB takes about half a second); a damaged folder is reported and rebuilt.
    Processes that ask for the same checkpoint wait for one another. The folder appears by one rename, so it is
    whole or absent; what a killed process left behind is removed by the next one that asks.
    """
    # transformers 5 writes rope settings that transformers 4 silently ignores: a folder serves one major version.
    major = version("transformers").partition(".")[0]
    folder = f"{checkpoint.sha256()[:24]}-f{FORMAT}-t{major}"
    try:
        root = user_cache_directory() / "models"
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder}.lock"):
            final, partial = root / folder, root / f"{folder}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            damage = _damage(final)
            if damage is None:
                return final
            if final.exists():
                log.warning("The cached weights of %s are damaged (%s); rebuilding them.", checkpoint.name, damage)
                shutil.rmtree(final)
            _build(checkpoint, partial)
            partial.rename(final)
            return final
    except OSError as error:
        raise ModelError(
            f"The model cache {user_cache_directory()} cannot be used: {error}. "
            "Free some space there, or set BPKV_CACHE_DIR to a directory that can be written."
        ) from error


def _build(checkpoint: GgufFile, partial: Path) -> None:
    partial.mkdir()
    try:
        source = checkpoint.whole_in(partial)
        dequantise(source, partial, checkpoint.name)
        if source.parent == partial:
            source.unlink()
        hashes = {file.name: sha256_of([file]) for file in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps({"source": checkpoint.name, "sha256": hashes}, indent=1))
    except BaseException:  # an interrupt too must leave nothing behind
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _damage(folder: Path) -> str | None:
    """What is wrong with a cached folder, or None."""
    if not folder.exists():
        return "absent"
    try:
        expected = json.loads((folder / MANIFEST).read_text())["sha256"]
        for name, digest in expected.items():
            if sha256_of([folder / name]) != digest:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return str(error)
    return None
