"""Estimates of memory are upper bounds of what is allocated, and not far above it."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.profiler import profile

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import InputError
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.models.traits_of import traits_of
from bpkv_trt.policies.registry import settled
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.memory import activation_bytes, free_bytes, pool_bytes, require_memory
from bpkv_trt.runtime.scratch import scratch_rows
from tests.models.small_models import configurations, random_model

LOOSE = 2.5  # times what is allocated, an estimate may claim
PROPORTIONS = {  # of a real model: an MLP three times as wide, many more ids than channels
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 3000,
    "max_position_embeddings": 8192,
}


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: int) -> LoadedModel:
    config = configurations()[name]
    for option, value in {**PROPORTIONS, **changes}.items():
        setattr(config, option, value)
    model = random_model(config).to(dtype)
    return LoadedModel(name, model, cast(Any, None), traits_of(model), cast(Any, None))


def peak(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at once beyond what was there before."""
    with profile(profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    events = (event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]")
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


@pytest.mark.parametrize(
    "options",
    [
        {"readout": "direct"},
        {"readout": "exact", "lookahead": 0},
        {"readout": "exact", "lookahead": 56},  # 64 positions have a probe each; fewer, as a stop token may leave, more
        {"readout": "direct", "lookahead": 0},
        {"readout": "exact", "lookahead": 100, "probes": 4},
        {"preset": "paper"},
        {"policy": "snapkv"},
        {"policy": "snapkv", "lookahead": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "cohere", "qwen2_sliding"])
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(512, torch.float32), (2048, torch.float32), (1024, torch.bfloat16)], ids=str
)
def test_activations_stay_within_their_estimate(
    name: str, options: dict[str, Any], tokens: int, dtype: torch.dtype
) -> None:
    loaded, config = model_of(name, dtype), settled(BpkvConfig(**options, regime="prefill"))
    engine = Engine(
        loaded, config, make_pool(loaded, tokens, config.page_size, scratch=scratch_rows(config, None, [tokens]))
    )
    sequence, prompt = engine.open(tokens), [3 + index % 900 for index in range(tokens)]
    measured = max(
        peak(lambda: engine.encode([(sequence, prompt)])),
        peak(lambda: engine.compactor.on_context_step_end(sequence)),
    )
    assert measured <= activation_bytes(loaded, tokens, config) <= LOOSE * measured


@pytest.mark.parametrize(("vocabulary", "layers"), [(60_000, 2), (3000, 16)])
@pytest.mark.parametrize("lookahead", [0, 64])
def test_a_large_vocabulary_and_many_layers_count(vocabulary: int, layers: int, lookahead: int) -> None:
    """A short prompt, whose scoring positions' logits, or their statistics by layer, are the most there is."""
    loaded = model_of("llama", vocab_size=vocabulary, num_hidden_layers=layers)
    config = BpkvConfig(regime="prefill", lookahead=lookahead)
    engine = Engine(loaded, config, make_pool(loaded, 96, config.page_size, scratch=scratch_rows(config, None, [96])))
    sequence = engine.open()
    prefill = peak(lambda: engine.encode([(sequence, list(range(3, 99)))]))
    measured = max(prefill, peak(lambda: engine.compactor.on_context_step_end(sequence)))
    assert measured <= activation_bytes(loaded, 96, config) <= LOOSE * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "page_size"), [(1, 16), (100, 16), (1000, 32)])
def test_a_pool_takes_what_was_estimated(dtype: torch.dtype, rows: int, page_size: int) -> None:
    loaded = model_of("llama", dtype)
    pool = make_pool(loaded, rows, page_size)
    held = (pool.keys, pool.values, pool.row_positions)
    assert pool_bytes(loaded, rows, page_size) == sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match="about 64 MiB.*the limit given, 63 MiB.*Nothing was run"):
        require_memory(64 << 20, torch.device("cpu"), 63 << 20)
    require_memory(64 << 20, torch.device("cpu"), 64 << 20)
    with pytest.raises(InputError, match="what is free on cpu"):
        require_memory(2 * free_bytes(torch.device("cpu")), torch.device("cpu"), None)
