"""The most rows that a sequence comes to hold, against a walk through its tokens."""

import random

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.budget import resolve
from bpkv_trt.errors import ConfigError
from bpkv_trt.runtime.most_rows import most_rows
from tests.runtime.random_models import wrapped


def walked(config: BpkvConfig, prompt: int, new_tokens: int) -> int:
    """As a compactor would go, of one head: rows of prompt and answer after every run, before it compacts."""
    traits = wrapped("llama").traits
    sizes = {"layers": traits.layers, "kv_heads": traits.kv_heads, "head_dim": traits.head_dim, "itemsize": 4}

    def kept(budget: object, tokens: int, protected: int) -> int:
        return resolve(budget, tokens=tokens, protected=protected, **sizes).per_head  # type: ignore[arg-type]

    old, new, most = prompt, 0, prompt
    if "prefill" in config.regime:
        old = kept(config.budget, prompt, config.protected)
    compacted = "deferred" not in config.regime
    for generated in range(1, new_tokens + 1):
        new += 1
        most = max(most, old + new)
        if not compacted:
            if generated == config.defer:
                left = kept(config.budget, prompt + generated, config.protected)
                old, new, compacted = left - min(new, left), min(new, left), True
        elif "generation" in config.regime and generated % config.interval == 0:
            new = min(new, kept(config.generation_budget, new, config.recent))
    return most


def test_it_is_never_exceeded_and_reached() -> None:
    chance, reached = random.Random(3), 0
    regimes = ["prefill", "prefill,generation", "deferred", "deferred,generation", "generation"]
    for _ in range(3000):
        given = {"regime": chance.choice(regimes), "sinks": 2, "recent": 9, "positions": 3, "defer": 6}
        given |= {"interval": chance.randint(1, 20), "generation_budget": f"{chance.randint(9, 30)}t"}
        config = BpkvConfig(**given, budget=str(chance.randint(1, 10) / 10))
        prompt, new_tokens = chance.randint(1, 60), chance.randint(1, 80)
        bound = most_rows(config, wrapped("llama").traits, 4, prompt, new_tokens)
        most = walked(config, prompt, new_tokens)
        assert prompt <= most <= bound <= prompt + max(new_tokens, 6)
        reached += most == bound
    assert reached > 1500, reached


def test_a_budget_that_cannot_be_honoured() -> None:
    with pytest.raises(ConfigError, match="leaves [0-9] tokens per head"):
        most_rows(BpkvConfig(budget="1KiB"), wrapped("llama").traits, 4, 100, 10)
