"""What a server is started with: a model or an engine, its limits, and the configuration that requests may change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError, quoted
from bpkv_trt.yaml_file import yaml_mapping

FORMAT = "bpkv-serving-1"  # the first entry of a file of ours
OF_MODELS = ("model", "dtype", "device", "pool_bytes", "chunk_tokens")
OF_ENGINES = ("engine", "tokenizer", "plugin_lib", "bounded_cache")


@dataclass(frozen=True)
class ServingSettings:
    """Of a `model` or an `engine`. Invalid ones raise ConfigError."""

    model: str | None = None  # Hugging Face directory or id, GGUF file, or a name of the catalogue
    # Of BpkvConfig, for requests that say nothing else; an engine's are in place of those that it was built with.
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"  # float32 on a CPU, bfloat16 on a GPU
    device: str = "auto"  # a GPU where there is one
    pool_bytes: int = 1 << 30  # of keys and values, all requests together
    chunk_tokens: int = 256  # of prompts, that one step runs beside the running answers
    engine: str | None = None  # its folder
    tokenizer: str | None = None  # of the engine's model, named as a model is
    plugin_lib: str | None = None  # the engine's; None: where it is looked for
    bounded_cache: bool = False  # memory for what compactions leave alone
    queue_limit: int = 64  # requests that wait
    most_running: int = 64  # requests that share a step
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
        for name in ("model", "dtype", "device", "engine", "tokenizer", "plugin_lib"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"{name} is {quoted(getattr(self, name))}; give a name.")
        for name, value in {**vars(self), **self.options}.items():
            if isinstance(value, str) and not value.isascii():
                raise ConfigError(
                    f"{name} is {value}, and the Python in Triton finds no files with letters beyond ASCII; give "
                    "another name, such as that of a link."
                )
        if not isinstance(self.bounded_cache, bool):
            raise ConfigError(f"bounded_cache is {quoted(self.bounded_cache)}; give true or false.")
        if self.trace is not None and not (isinstance(self.trace, str) and Path(self.trace).is_absolute()):
            raise ConfigError(f"trace is {quoted(self.trace)}; give the full path of a file, or leave it out.")
        self._check_kind()

    def _check_kind(self) -> None:
        if (self.model is None) == (self.engine is None):
            raise ConfigError("There must be an entry model or an entry engine, and not both: keep one of them.")
        for each in fields(self):
            if each.name in self._others and getattr(self, each.name) != each.default:
                kind = "an engine" if self.engine is None else "a model"
                raise ConfigError(f"{each.name} is {quoted(getattr(self, each.name))}, which is for {kind}; remove it.")
        if self.engine is None:
            BpkvConfig(**self.options)
        elif self.tokenizer is None:
            raise ConfigError("There is no entry tokenizer, and an engine has none: name that of its model.")

    @property
    def source(self) -> str:
        """What is served: the model, or the engine's folder."""
        return self.model or self.engine or ""

    @property
    def config(self) -> BpkvConfig:
        """Of a model's requests that say nothing else."""
        return BpkvConfig(**self.options)

    @property
    def _others(self) -> tuple[str, ...]:
        return OF_ENGINES if self.engine is None else OF_MODELS

    def to_yaml(self) -> str:
        """YAML that `read` takes."""
        names = [each.name for each in fields(self) if each.name not in ("options", *self._others)]
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        document = {"format": FORMAT, **own, "compression": dict(self.options)}
        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))

    @classmethod
    def read(cls, path: Path) -> "ServingSettings":
        """Those of a file that `to_yaml` wrote, edited or not. Raises ConfigError, which names it."""
        form = f"format: {FORMAT}"
        document = yaml_mapping(path, "serving configuration", "bpkv model-repository", form)
        if document.pop("format", None) != FORMAT:
            raise ConfigError(f"{path} has no line `{form}`; write it with `bpkv model-repository`.")
        options = document.pop("compression", {})
        names = {each.name for each in fields(cls)} - {"options"}
        if unknown := sorted(document.keys() - names):
            raise ConfigError(f"{path} has {quoted(unknown[0])}; the entries are {', '.join(sorted(names))}.")
        if not isinstance(options, dict):
            raise ConfigError(f"{path} needs a mapping under compression; correct it.")
        try:
            return cls(**document, options={str(name): value for name, value in options.items()})
        except ConfigError as error:
            raise ConfigError(f"In {path}: {error}") from None
