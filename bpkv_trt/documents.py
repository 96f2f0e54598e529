"""JSON documents that runs leave behind: what they were made with, and how they reach the disk whole or not at all."""

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpkv_trt import __version__
from bpkv_trt.errors import InputError
from bpkv_trt.input_file import read_file

if TYPE_CHECKING:  # kernels are compiled where pydantic may be missing
    from bpkv_trt.config import BpkvConfig

LARGEST_DOCUMENT = 1 << 30  # bytes, more than any has: a trace of a million ranges has some 200 MB
SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away
_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "triton", "tensorrt", "tensorrt_llm")


def document(config: "BpkvConfig", body: dict[str, Any]) -> dict[str, Any]:
    """`body` with the schema version, resolved configuration, library versions and machine before it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "config": config.model_dump(mode="json"),
        "versions": library_versions(),
        "machine": machine(),
        **body,
    }


def library_versions() -> dict[str, str]:
    """Versions of Python, this package and the installed libraries that results may depend on."""
    versions = {"python": platform.python_version(), "bpkv_trt": __version__}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def machine() -> dict[str, Any]:
    """The machine that timings belong to; threads and GPU as torch uses them, where torch is installed."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "threads": None,
        "gpu": None,
    }
    try:
        import torch
    except ImportError:
        return facts
    facts["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def usable_cores() -> int:
    """Those that this process may run on, where the system says; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def check_destination(
    path: Path, inputs: Iterable[tuple[str, Path | None]] = (), *, flag: str = "--json", any_file: bool = False
) -> None:
    """Refuse, before any work is done, a path that a document could not or must not be written to.

    path: given to `flag`. inputs: options, and the files that they name, none of which is overwritten; neither is what
    our output goes to. Any other file that is there is replaced if it is a document of ours, or with `any_file`.

    Raises InputError.
    """
    if str(path) == "-":
        raise InputError("The output - is no file: what is printed is for reading. Give the name of a file to write.")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"The output {path} is a device or a pipe, which is not written to; give the name of a file.")
    if path.is_file() and not os.access(path, os.W_OK):
        raise InputError(f"The output {path} is write-protected; choose another name, or allow writing to it.")
    if path.is_dir():
        raise InputError(f"The output {path} is a directory; give the name of a file to write in it.")
    if stream := _stream_into(path):
        raise InputError(
            f"{flag} would overwrite what the {stream} of this command goes to, {path}; give another name."
        )
    for option, given in inputs:
        if given is not None and _same_file(given, path):
            raise InputError(f"{flag} would overwrite the file given to {option}, {given}; give another name.")
    if path.exists() and not any_file and not _is_ours(path):
        raise InputError(
            f"The output {path} is there and is no document of bpkv, so it is left as it is; give another name, or "
            "move that file away."
        )
    # A link stays one, what it leads to is written.
    _check_writable((path.resolve() if path.is_symlink() else path).parent, path.name)


def _check_writable(folder: Path, name: str) -> None:
    if not folder.is_dir():
        raise InputError(f"The directory {folder} for {name} does not exist; create it first.")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # asking for permission answers wrongly for root
    except OSError as error:
        raise InputError(
            f"The directory {folder} cannot be written to ({error.strerror}); choose another one."
        ) from None


def _stream_into(path: Path) -> str | None:
    """Which of our standard streams goes to this file, by whatever name."""
    for number, name in ((1, "standard output"), (2, "standard error")):
        with suppress(OSError):  # there is no such file yet, or the stream is closed
            if os.path.samestat(path.stat(), os.fstat(number)):
                return name
    return None


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # one of them is not there, or cannot be
        return False


def _is_ours(path: Path) -> bool:
    """Whether a file is a report that some run of ours left; what has a checksum of its own belongs to an engine."""
    try:
        found = json.loads(read_file(path, LARGEST_DOCUMENT, "output", "it"))
    except (InputError, ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or "schema_version" not in found or "checksum" in found:
        return False
    versions = found.get("versions")
    return isinstance(versions, dict) and "bpkv_trt" in versions


def check_directory(path: Path) -> None:
    """Refuse, before any work is done, a directory that files could not be written to; raises InputError.

    It may be missing where its parent is there: then it can be made.
    """
    if path.is_symlink() and not path.exists():
        raise InputError(f"The directory {path} is a link to {path.readlink()}, where nothing is; give another name.")
    if path.exists() and not path.is_dir():
        raise InputError(f"The directory {path} is a file; give the name of a directory.")
    _check_writable(path if path.is_dir() else path.parent, path.name)


def deliver(show: Callable[[], None], path: Path | None, content: dict[str, Any]) -> None:
    """Neither a full disk loses what is printed, nor a reader of our output that has gone what is written."""
    try:
        show()
    finally:
        if path is not None:
            write_json(path, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a document; a reader sees the old file or the whole new one. NaN and infinities become null."""
    path = path.resolve()  # a link stays one, what it leads to is written
    try:
        write_whole(path, _text(_finite(content)).encode())
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"The output {path} cannot be written ({reason}); free space or move it.") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave what was there, if anything; OSError says why."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # a temporary file is private, a document is as the user's other files
        temporary.replace(path)
    except BaseException:  # an interrupt too must leave nothing behind
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def _text(content: dict[str, Any]) -> str:
    """JSON for people and for tools that go by lines: every record of a list of records has a line of its own."""
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False)
    parts = []
    for key, value in content.items():
        records = isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
        lines = ",\n".join(f"    {dump(each)}" for each in value) if records else ""
        body = f"[\n{lines}\n  ]" if records else dump(value, indent=2).replace("\n", "\n  ")
        parts.append(f"  {dump(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if abs(value) < float("inf") else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value
