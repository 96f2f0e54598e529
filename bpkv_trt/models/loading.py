"""Loading a model by the name a user types."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ModelError
from bpkv_trt.models.catalogue import CATALOGUE, packaged_model
from bpkv_trt.models.checked_weights import checked_weights
from bpkv_trt.models.checkpoint_cache import cached_checkpoint
from bpkv_trt.models.failure import told
from bpkv_trt.models.families import family_of
from bpkv_trt.models.gguf_file import GgufFile
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.models.traits_of import traits_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # what cannot be one is never looked up: that takes long offline
FILES = {  # of a model's directory: by what they hold, the names they go by, the usual one first
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "*.model*", "vocab*", "*.tiktoken", "tekken.json"),
}


class HostedModel(Protocol):
    """All of a model that running it takes: text goes in as tokens."""

    @property
    def model(self) -> PreTrainedModel:
        """Ready for inference, of a covered architecture."""

    @property
    def traits(self) -> ModelTraits:
        """As `traits_of` reads them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for inference (eval mode, no gradients), with all that depends on its checkpoint."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    traits: ModelTraits
    encoder: PromptEncoder


def load_model(name: str, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load `smollm2`, `gemma3-270m`, a Hugging Face directory, a GGUF file, or a model id of the hub.

    `dtype` is float32, bfloat16 or float16. ModelError says in one paragraph why a model cannot be loaded: a missing
    package, a damaged or incomplete checkpoint, an architecture that is not covered.
    """
    if dtype not in DTYPES:
        raise ModelError(f"Unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}.")
    source = model_source(name)
    config = _parsed(name, "configuration", lambda: AutoConfig.from_pretrained(source, trust_remote_code=False))
    family = family_of(config)
    tokenizer = _tokenizer(name, source)
    _check_generation_config(name, source)
    model = _parsed(name, "weights", lambda: checked_weights(name, source, DTYPES[dtype])).to(device)
    traits = traits_of(model, vocabulary=max(tokenizer.get_vocab().values()) + 1)
    return LoadedModel(name, model, tokenizer, traits, PromptEncoder(tokenizer, always_bos=family.always_bos))


def model_source(name: str) -> str:
    """What from_pretrained takes: a directory, or a model id of the hub, which is not looked up. Raises ModelError."""
    if not name.strip():
        raise ModelError(
            f"--model is empty; give a Hugging Face directory or id, a GGUF file, or one of {', '.join(CATALOGUE)}."
        )
    if name in CATALOGUE:
        return str(cached_checkpoint(packaged_model(name)))
    try:
        path = Path(name).expanduser()
        is_file, is_directory = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # no permission, a name too long, the home of nobody
        raise ModelError(f"The model {name!r} cannot be looked for ({error}); check the path given.") from error
    if is_file:
        return str(cached_checkpoint(GgufFile(path.name, (path,))))
    if is_directory:
        _check_files(name, path)
        return str(path)
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"There is no model at {name!r}: {_next_step(name)}")
    return name


def _check_files(name: str, directory: Path) -> None:
    """What transformers says of an absent file is about something else, such as a package that would not help."""
    for what, patterns in FILES.items():
        if not any(any(directory.glob(pattern)) for pattern in patterns):
            raise ModelError(f"{name!r} comes without a {what}: the directory has no {patterns[0]}. {_next_step(name)}")


def _check_generation_config(name: str, source: str) -> None:
    """transformers goes on without a damaged one, and the answer past its end."""
    if (Path(source) / "generation_config.json").is_file():
        _parsed(name, "generation configuration", lambda: GenerationConfig.from_pretrained(source))


def _parsed(name: str, what: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ModelError:
        raise
    except Exception as error:  # damaged files fail in many ways inside transformers, safetensors and tokenizers
        raise ModelError(f"The {what} of {name!r} cannot be loaded ({told(error)}). {_next_step(name)}") from error


def _next_step(name: str) -> str:
    if Path(name).expanduser().is_dir():
        return "Check that the directory is a complete Hugging Face model (config.json, tokenizer files, weights)."
    return (
        f"{name!r} is no file or directory here and none of {', '.join(CATALOGUE)}. If it is a model id of the Hugging "
        "Face hub, check its spelling, the network (or the hub's local cache), and access rights."
    )


def _tokenizer(name: str, source: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = _parsed(
        name, "tokenizer", lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    )
    words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    if len(words) <= 1:  # without tokenizer files transformers 5 makes an empty one and goes on
        raise ModelError(f"{name!r} comes without a tokenizer, so no text can be given to it. {_next_step(name)}")
    return tokenizer
