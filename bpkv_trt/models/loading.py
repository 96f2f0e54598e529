"""Loading a model by the name a user types."""

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ModelError
from bpkv_trt.models.checked_weights import checked_weights
from bpkv_trt.models.families import family_of
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.models.source import ModelSource
from bpkv_trt.models.tokenizers import check_generation_config, tokenizer_of
from bpkv_trt.models.traits_of import traits_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    source = ModelSource(name)
    found = source.find()
    config = source.parsed("configuration", lambda: AutoConfig.from_pretrained(found, trust_remote_code=False))
    family = family_of(config)
    tokenizer = tokenizer_of(source, found)
    check_generation_config(source, found)
    model = source.parsed("weights", lambda: checked_weights(name, found, DTYPES[dtype])).to(device)
    traits = traits_of(model, vocabulary=max(tokenizer.get_vocab().values()) + 1)
    return LoadedModel(name, model, tokenizer, traits, PromptEncoder(tokenizer, always_bos=family.always_bos))
