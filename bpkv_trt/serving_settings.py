"""What a server is started with: the model, its place, its limits, and the configuration that requests may change."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError, quoted
from bpkv_trt.input_file import read_file
from bpkv_trt.yaml_file import LARGEST_CONFIG

FORMAT = "bpkv-serving-1"  # the first entry of a file of ours


@dataclass(frozen=True)
class ServingSettings:
    """Invalid ones raise ConfigError."""

    model: str  # Hugging Face directory or id, GGUF file, or a name of the catalogue
    config: BpkvConfig  # of requests that say nothing else
    dtype: str = "auto"  # float32 on a CPU, bfloat16 on a GPU
    device: str = "auto"  # a GPU where there is one
    pool_bytes: int = 1 << 30  # of keys and values, all requests together
    queue_limit: int = 64  # requests that wait for pages
    most_running: int = 64  # requests that share a step
    chunk_tokens: int = 256  # of prompts, that one step runs beside the running answers
    most_text_bytes: int = 4 << 20  # of a request's text and question, some million tokens
    most_new_tokens: int = 4096  # that a request may ask for
    timeout_s: float = 600.0  # that a request may take, waiting included
    trace: str | None = None  # file that the ranges of all requests are written to when the model ends

    def __post_init__(self) -> None:
        for name in ("pool_bytes", "queue_limit", "most_running", "chunk_tokens", "most_text_bytes", "most_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
                raise ConfigError(f"{name} is {quoted(value)}; give a whole number of at least 1.")
        seconds = self.timeout_s
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
            raise ConfigError(f"timeout_s is {quoted(seconds)}; give seconds, more than 0.")
        for name in ("model", "dtype", "device"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {quoted(getattr(self, name))}; give a name.")
        if self.trace is not None and not (isinstance(self.trace, str) and Path(self.trace).is_absolute()):
            raise ConfigError(f"trace is {quoted(self.trace)}; give the full path of a file, or leave it out.")

    def to_yaml(self) -> str:
        """YAML that `read` takes."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "config"}
        compression = self.config.model_dump(mode="json", exclude_unset=True)
        document = {"format": FORMAT, **own, "compression": compression}
        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))

    @classmethod
    def read(cls, path: Path) -> "ServingSettings":
        """Those of a file that `to_yaml` wrote, edited or not. Raises ConfigError, which names it."""
        content = read_file(path, LARGEST_CONFIG, "serving configuration", "bpkv model-repository", ConfigError)
        try:
            document: Any = yaml.safe_load(content.decode("utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise ConfigError(f"{path} is not valid YAML ({' '.join(str(error).split())[:400]}); correct it.") from None
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ConfigError(f"{path} has no line `format: {FORMAT}`; write it with `bpkv model-repository`.")
        compression = document.pop("compression", {})
        names = {field.name for field in fields(cls)} - {"config"}
        if unknown := sorted(map(str, document.keys() - names)):
            raise ConfigError(f"{path} has {quoted(unknown[0])}; the entries are {', '.join(sorted(names))}.")
        if "model" not in document or not isinstance(compression, dict):
            raise ConfigError(f"{path} needs an entry model, and a mapping under compression; correct it.")
        try:
            return cls(**document, config=BpkvConfig(**{str(name): value for name, value in compression.items()}))
        except ConfigError as error:
            raise ConfigError(f"In {path}: {error}") from None
