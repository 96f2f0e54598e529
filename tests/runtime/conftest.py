"""Trained models on fresh engines, and small ones whose answers have no end."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.runtime.engine import Engine, make_pool
from build_scripts.recall_text import recall_prompt
from tests.runtime.random_models import COMPACTABLE, wrapped

ASSETS = Path(__file__).parents[1] / "assets"
TRAINED = ("tiny-llama", "tiny-gemma")
SMALL: dict[str, Any] = {"recent": 16, "positions": 6, "interval": 16, "generation_budget": "20t", "page_size": 8}

MakeEngine = Callable[..., Engine]


@cache
def loaded(name: str, dtype: str = "float32") -> LoadedModel:
    return load_model(str(ASSETS / name) if name in TRAINED else name, dtype=dtype)


def prompt_tokens(name: str, seed: int, tokens: int) -> list[int]:
    """A recall prompt of about so many tokens."""
    return loaded(name).encoder.encode_raw(recall_prompt(seed, tokens)[0])


@pytest.fixture
def make_engine() -> MakeEngine:
    def make(name: str, dtype: str = "float32", rows: int = 900, **options: Any) -> Engine:
        config = BpkvConfig(**{**SMALL, **options})
        model = loaded(name, dtype)
        return Engine(model, config, make_pool(model, rows, config.page_size, poison=True))

    return make


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer."""
    for name in COMPACTABLE:
        for each in (wrapped(name), wrapped(name, torch.float32)):  # cached apart
            monkeypatch.setattr(each.model.generation_config, "eos_token_id", None)
