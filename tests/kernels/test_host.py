"""The host on kernels: decoding, evidence and compaction of whole requests, held to masked forwards and to PyTorch."""

from typing import Any

import pytest
import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.runtime.engine import Engine, make_pool
from tests.runtime.random_models import SMALL, random_tokens, wrapped
from tests.runtime.trail import Trail, assert_masked, follow

LENGTHS, STEPS = (70, 41), (12, 12)


def trails(name: str, *, kernels: bool, **options: Any) -> list[Trail]:
    config = BpkvConfig(**{**SMALL, "budget": "0.4", "generation_budget": "14t", **options})
    pool = make_pool(wrapped(name), 300, config.page_size, poison=True, kernels=kernels)
    prompts = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]
    return follow(Engine(wrapped(name), config, pool), prompts, [random_tokens(9, steps) for steps in STEPS])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("readout", ["direct", "exact"])
def test_a_host_on_kernels_evicts_the_same_and_evicted_is_masked(name: str, readout: str) -> None:
    options = {"readout": readout, "lookahead": 6, "rehearsal": 20, "refine": 6}
    ours, plain = (trails(name, kernels=kernels, **options) for kernels in (True, False))
    assert_masked(name, ours)
    for mine, other in zip(ours, plain, strict=True):
        assert [event.entries_after for event in mine.events] == [event.entries_after for event in other.events]
        for one, two in zip(mine.events, other.events, strict=True):
            print(one.estimated_kl, two.estimated_kl, one.estimated_kl_stage1, two.estimated_kl_stage1)
        print((mine.hidden_from() != other.hidden_from()).float().mean())
