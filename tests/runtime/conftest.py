"""Trained models on fresh engines, and small ones whose answers have no end."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.serving_batch import ServingBatch
from bpkv_trt.runtime.serving_loop import ServingLoop
from build_scripts.recall_text import recall_prompt
from tests.runtime.random_models import COMPACTABLE, wrapped
from tests.runtime.received import PATIENCE

ASSETS = Path(__file__).parents[1] / "assets"
TRAINED = ("tiny-llama", "tiny-gemma")
SMALL: dict[str, Any] = {"recent": 16, "positions": 6, "interval": 16, "generation_budget": "20t", "page_size": 8}

SERVED: dict[str, Any] = {**SMALL, "budget": "0.3", "lookahead": 4, "rehearsal": 0, "refine": 8}

MakeEngine = Callable[..., Engine]
MakeLoop = Callable[..., ServingLoop]


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


@pytest.fixture
def make_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLoop]:
    """Loops over poisoned pools that are checked after every step, and are empty when the test is done."""
    loops = list[ServingLoop]()
    step = ServingBatch.step

    def checked(self: ServingBatch) -> Any:
        took_part = step(self)
        self.pool.check_integrity()
        return took_part

    monkeypatch.setattr(ServingBatch, "step", checked)

    def make(rows: int = 900, options: dict[str, Any] | None = None, **sizes: Any) -> ServingLoop:
        model, config = loaded("tiny-llama"), BpkvConfig(**{**SERVED, **(options or {})})
        traits = model.traits
        size = rows * traits.layers * traits.kv_heads * (2 * traits.head_dim * 4 + 4)
        of_loop = {name: sizes.pop(name) for name in ("queue_limit", "metrics") if name in sizes}
        trace = sizes.pop("trace", Trace())
        batch = ServingBatch.over(model, config, trace, pool_bytes=size, poison=True, **{"chunk_tokens": 64, **sizes})
        loops.append(ServingLoop(batch, model, **of_loop))
        assert loops[-1].batch.pool.pages == rows * traits.layers * traits.kv_heads // config.page_size
        return loops[-1]

    yield make
    for loop in loops:
        loop.shutdown(PATIENCE)
        assert not loop.healthy and not loop.batch.waiting and not loop.batch.running
        assert loop.batch.pool.live_pages == 0 and loop.batch.pool.sequences == ()
