"""Where what a user named is loaded from: a model, or a tokenizer alone."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bpkv_trt.errors import ModelError
from bpkv_trt.models.catalogue import CATALOGUE, packaged_model
from bpkv_trt.models.checkpoint_cache import cached_checkpoint
from bpkv_trt.models.failure import told
from bpkv_trt.models.gguf_file import GgufFile

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # what cannot be one is never looked up: that takes long offline
FILES = {  # of a directory: by what they hold, the names they go by, the usual one first
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "*.model*", "vocab*", "*.tiktoken", "tekken.json"),
}
NEEDED = {"model": ("configuration", "tokenizer"), "tokenizer": ("tokenizer",)}
COMPLETE = {
    "model": "model (config.json, tokenizer files, weights)",
    "tokenizer": "tokenizer (tokenizer.json and tokenizer_config.json, or a model's whole directory)",
}


@dataclass(frozen=True)
class ModelSource:
    """`smollm2`, `gemma3-270m`, a Hugging Face directory, a GGUF file, or a model id of the hub."""

    name: str
    wanted: Literal["model", "tokenizer"] = "model"  # also the name of the command's option

    def find(self) -> str:
        """What from_pretrained takes: a directory, or a model id of the hub. ModelError where it is neither."""
        name = self.name
        if not name.strip():
            raise ModelError(
                f"--{self.wanted} is empty; give a Hugging Face directory or id, a GGUF file, or one of "
                f"{', '.join(CATALOGUE)}."
            )
        if name in CATALOGUE:
            return str(cached_checkpoint(packaged_model(name)))
        try:
            path = Path(name).expanduser()
            is_file, is_directory = path.is_file(), path.is_dir()
        except (OSError, RuntimeError) as error:  # no permission, a name too long, the home of nobody
            raise ModelError(
                f"The {self.wanted} {name!r} cannot be looked for ({error}); check the path given."
            ) from error
        if is_file:
            return str(cached_checkpoint(GgufFile(path.name, (path,))))
        if is_directory:
            self._check_files(path)
            return str(path)
        if not HUB_ID.fullmatch(name):
            raise ModelError(f"There is no {self.wanted} at {name!r}: {self.next_step}")
        return name

    def parsed(self, what: str, read: Callable[[], Any]) -> Any:
        """What `read` returns; ModelError where that fails, which names `what`."""
        try:
            return read()
        except ModelError:
            raise
        except Exception as error:  # damaged files fail in many ways inside transformers, safetensors and tokenizers
            raise ModelError(
                f"The {what} of {self.name!r} cannot be loaded ({told(error)}). {self.next_step}"
            ) from error

    @property
    def next_step(self) -> str:
        """What the user can do where something of it is missing or damaged."""
        if Path(self.name).expanduser().is_dir():
            return f"Check that the directory is a complete Hugging Face {COMPLETE[self.wanted]}."
        return (
            f"{self.name!r} is no file or directory here and none of {', '.join(CATALOGUE)}. If it is a model id of "
            "the Hugging Face hub, check its spelling, the network (or the hub's local cache), and access rights."
        )

    def _check_files(self, directory: Path) -> None:
        """What transformers says of an absent file is about something else, such as a package that would not help."""
        for what in NEEDED[self.wanted]:
            if not any(any(directory.glob(pattern)) for pattern in FILES[what]):
                raise ModelError(
                    f"{self.name!r} comes without a {what}: the directory has no {FILES[what][0]}. {self.next_step}"
                )
