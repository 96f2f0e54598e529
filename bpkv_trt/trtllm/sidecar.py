"""What lies beside an engine with BP-KV in it: what it was built with, and whether it still is that engine."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpkv_trt.documents import library_versions, write_json
from bpkv_trt.errors import BpkvError, ConfigError, InputError, quoted
from bpkv_trt.input_file import read_file
from bpkv_trt.trtllm.plugin_library import ABI, PluginLibrary
from bpkv_trt.trtllm.projections import file_of
from bpkv_trt.trtllm.settings import EngineSettings

FILE, CONFIG, KERNELS = "bpkv_config.json", "config.json", "bpkv_kernels.bundle"
SCHEMA_VERSION = 1
LARGEST = 1 << 26  # bytes of a sidecar, or of an engine's config.json
BUILD = "build the engine with `bpkv-trtllm-build --plugin bpkv`"


@dataclass(frozen=True)
class EngineSidecar:
    """A sidecar that belongs to the engine beside it."""

    settings: EngineSettings
    versions: dict[str, str]  # of what built it

    @classmethod
    def write(cls, engine: Path, settings: EngineSettings, versions: Mapping[str, str]) -> "EngineSidecar":
        """Describe the engine that was just built in this folder. versions: of what no package's metadata tells.

        Raises InputError where the engine is not whole or nothing can be written, BpkvError where it was not built with
        these settings.
        """
        pretrained = read_config(engine)["pretrained_config"]
        if pretrained.get("bpkv") != settings.document():
            raise BpkvError(f"The engine in {engine} was not built with these settings; {BUILD} again.")
        ranks = pretrained.get("mapping", {}).get("world_size", 1)
        sidecar = cls(settings, library_versions() | dict(versions))
        content = {
            "schema_version": SCHEMA_VERSION,
            "versions": sidecar.versions,
            "settings": settings.document(),
            "engine": _measured(engine, [CONFIG, *_parts(engine, ranks)]),
        }
        write_json(engine / FILE, {**content, "checksum": _checksum(content)})
        return sidecar

    @classmethod
    def read(cls, engine: Path) -> "EngineSidecar":
        """That of the engine in a folder.

        Raises InputError where there is none, where it or the engine was changed since, and ConfigError where another
        version of bpkv wrote it.
        """
        path = engine / FILE
        pretrained = read_config(engine)["pretrained_config"]
        if not os.path.lexists(path):
            raise InputError(
                f"The engine in {engine} was built with BP-KV, and its {FILE} is missing: copy all files of its folder."
                if "bpkv" in pretrained
                else f"The engine in {engine} was built without BP-KV: it has no {FILE}. To compact, {BUILD}."
            )
        content = _object(read_file(path, LARGEST, "engine's sidecar", "--engine-dir"), path)
        if (version := content.get("schema_version")) != SCHEMA_VERSION:
            raise ConfigError(
                f"The engine's sidecar {path} is of version {quoted(version)}, and this version of bpkv reads "
                f"{SCHEMA_VERSION}: build the engine again, or install the bpkv that built it."
            )
        if content.pop("checksum", None) != _checksum(content):
            raise InputError(
                f"The engine's sidecar {path} was edited or is damaged: its checksum does not fit. It tells what is "
                f"compiled into the engine, so {BUILD} again for anything else; other options are the runtime's."
            )
        settings = EngineSettings.from_document(content["settings"], str(path))
        if settings.plugin_abi != ABI:
            raise ConfigError(
                f"The engine in {engine} was built with a plugin of interface {settings.plugin_abi}, and this version "
                f"of bpkv speaks {ABI}: build the engine again, or install the bpkv that built it."
            )
        measured = _measured(engine, content["engine"])
        if changed := [name for name, each in content["engine"].items() if measured[name] != each]:
            raise InputError(
                f"The engine in {engine} is not the one that its {FILE} was written for: {', '.join(changed)} changed "
                f"since. Copy all files of one build, or {BUILD} again."
            )
        if pretrained.get("bpkv") != content["settings"]:
            raise InputError(
                f"The engine in {engine} and its {FILE} have different settings, so that one of them is of another "
                f"build: copy all files of one build, or {BUILD} again."
            )
        return cls(settings, content["versions"])

    def check_versions(self, present: Mapping[str, str]) -> None:
        """present: versions of `tensorrt` and `tensorrt_llm` here. Raises ConfigError where others built the engine."""
        differing = [
            f"{name} {built}, and here is {present.get(name, 'none')}"
            for name in ("tensorrt", "tensorrt_llm")
            if (built := self.versions.get(name)) is not None and built != present.get(name)
        ]
        if differing:
            raise ConfigError(
                f"The engine was built with {'; '.join(differing)}: TensorRT loads engines of its own version alone. "
                "Run it where it was built, or build it again."
            )

    def check_library(self, library: PluginLibrary) -> None:
        """Raises ConfigError for another plugin library than the one that the engine was built with."""
        built, found = self.settings.plugin_sha256, library.sidecar.sha256
        if built != found:
            raise ConfigError(
                f"The engine was built with another plugin library (SHA-256 {built[:16]}...) than {library.path} "
                f"({found[:16]}...): give that one to --plugin-lib, or build the engine again with this one."
            )


@contextmanager
def withdrawn(engine: Path) -> Iterator[None]:
    """Around a build into a folder: an earlier engine's sidecar is taken away, since its engine may be overwritten.

    It comes back where the build did not touch that engine; one that fails leaves none of its own.
    """
    path = engine / FILE
    content, before = path.read_bytes() if path.is_file() else None, _stamps(engine)
    path.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        if content is not None and not path.exists() and _stamps(engine) == before:
            path.write_bytes(content)


def _stamps(engine: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in engine.glob("*") if path.name == CONFIG or path.suffix == ".engine"]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def read_config(engine: Path) -> dict[str, Any]:
    """An engine's config.json; its `pretrained_config` is an object. Raises InputError where it is damaged."""
    content = read_file(engine / CONFIG, LARGEST, "engine's configuration", "--engine-dir")
    config = _object(content, engine / CONFIG)
    if not isinstance(config.get("pretrained_config"), dict):
        config["pretrained_config"] = {}
    return config


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object, so it is damaged; copy it again, or {BUILD} again.")
    return found


def _parts(engine: Path, ranks: int) -> list[str]:
    """Each rank has its engine, and, built with weights, its projections; all have the session's kernels."""
    names = [f"rank{rank}.engine" for rank in range(ranks)]
    return names + [name for name in (*map(file_of, range(ranks)), KERNELS) if (engine / name).exists()]


def _measured(engine: Path, names: Iterable[str]) -> dict[str, Any]:
    """What tells one engine from another: the SHA-256 of every file, but of the ranks' engines their bytes.

    These are not hashed, which would take as long as loading them.
    """
    measured: dict[str, Any] = {}
    for name in names:
        path = engine / name
        try:
            if not path.is_file():
                raise InputError(f"The engine in {engine} lacks {name}: copy all files of one build, or {BUILD} again.")
            measured[name] = path.stat().st_size if path.suffix == ".engine" else _sha256(path)
        except OSError as error:
            raise InputError(f"The engine's file {path} cannot be read ({error.strerror}); check it.") from None
    return measured


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()
