"""Loading a tokenizer, with its model or by itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from bpkv_trt.errors import ModelError
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.models.source import ModelSource
from bpkv_trt.models.stop_tokens import stop_tokens


class Words(Protocol):
    """Text to tokens and back, with a model or without."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of the model's vocabulary."""

    @property
    def encoder(self) -> PromptEncoder:
        """By that tokenizer."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """All that text takes beside a model that is loaded elsewhere."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    generation_config: GenerationConfig | None

    def stop_tokens(self, vocabulary: int) -> frozenset[int]:
        """What ends an answer of a model with so many tokens; ModelError where that is none of them."""
        return stop_tokens(self.generation_config, vocabulary, self.tokenizer)


def load_tokenizer(name: str) -> LoadedTokenizer:
    """The tokenizer of `--tokenizer`, named as a model is; a directory may hold nothing else.

    Raises ModelError where it cannot be loaded.
    """
    source = ModelSource(name, "tokenizer")
    found = source.find()
    tokenizer = tokenizer_of(source, found)
    return LoadedTokenizer(name, tokenizer, PromptEncoder(tokenizer), _generation_config(source, found))


def tokenizer_of(source: ModelSource, found: str) -> PreTrainedTokenizerBase:
    """found: of `source.find`. Raises ModelError where it cannot be loaded, or is empty."""
    tokenizer: PreTrainedTokenizerBase = source.parsed(
        "tokenizer", lambda: AutoTokenizer.from_pretrained(found, trust_remote_code=False)
    )
    words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    if len(words) <= 1:  # without tokenizer files transformers 5 makes an empty one and goes on
        raise ModelError(
            f"{source.name!r} comes without a tokenizer, so no text can be given to it. {source.next_step}"
        )
    return tokenizer


def check_generation_config(source: ModelSource, found: str) -> None:
    """transformers goes on without a damaged one, and the answer past its end."""
    if (Path(found) / "generation_config.json").is_file():
        source.parsed("generation configuration", lambda: GenerationConfig.from_pretrained(found))


def _generation_config(source: ModelSource, found: str) -> GenerationConfig | None:
    """As a model beside the tokenizer would have it; None where there is nothing of a model."""
    check_generation_config(source, found)
    try:
        return GenerationConfig.from_pretrained(found)
    except OSError:  # there is none
        pass
    try:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(found, trust_remote_code=False))
    except (OSError, ValueError):
        return None
