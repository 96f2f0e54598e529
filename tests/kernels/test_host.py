"""The host on kernels: decoding, evidence and compaction of whole requests, held to masked forwards and to PyTorch."""

from typing import Any

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.runtime.decode_step import DecodeStep
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.step import AppendStep, Chunk
from tests.runtime.random_models import SMALL, random_tokens, wrapped
from tests.runtime.trail import Trail, assert_masked, follow

LENGTHS, STEPS = (70, 41), (17, 9)


def trails(name: str, *, kernels: bool, **options: Any) -> list[Trail]:
    config = BpkvConfig(**{**SMALL, "budget": "0.4", "generation_budget": "14t", **options})
    pool = make_pool(wrapped(name), 300, config.page_size, poison=True, kernels=kernels)
    prompts = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]
    return follow(Engine(wrapped(name), config, pool), prompts, [random_tokens(9, steps) for steps in STEPS])


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # softcap and sliding windows in the latter
@pytest.mark.parametrize("readout", ["direct", "exact"])
def test_a_host_on_kernels_evicts_the_same_and_evicted_is_masked(name: str, readout: str) -> None:
    options = {"readout": readout, "lookahead": 3, "rehearsal": 20, "refine": 6}
    ours, plain = (trails(name, kernels=kernels, **options) for kernels in (True, False))
    assert_masked(wrapped(name), ours)
    assert [event.regime for event in ours[0].events] == ["prefill", "generation", "generation"]
    for mine, other in zip(ours, plain, strict=True):
        for one, two in zip(mine.events, other.events, strict=True):
            assert (one.note, one.entries_after, one.pages_freed) == (two.note, two.entries_after, two.pages_freed)
            if one.note is None:
                assert one.estimated_kl == pytest.approx(two.estimated_kl, rel=1e-4)
        assert (mine.hidden_from() != other.hidden_from()).float().mean() < 0.01  # but for near ties


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "tova"])
def test_other_policies_see_what_they_see_without_kernels(policy: str) -> None:
    ours, plain = (trails("llama", kernels=kernels, policy=policy, scope="head") for kernels in (True, False))
    assert_masked(wrapped("llama"), ours)
    for mine, other in zip(ours, plain, strict=True):
        assert mine.events[0].note is None
        assert (mine.hidden_from() != other.hidden_from()).float().mean() < 0.01


def test_kernels_decode_one_token_of_each_sequence_and_nothing_else() -> None:
    (trail, _) = trails("llama", kernels=True, policy="full")
    host, sequence = trail.engine.host, trail.sequence
    assert isinstance(host._append_step([Chunk(sequence, [5])]), DecodeStep)
    assert type(host._append_step([Chunk(sequence, [5, 6])])) is AppendStep
    (plain, _) = trails("llama", kernels=False, policy="full")
    assert type(plain.engine.host._append_step([Chunk(plain.sequence, [5])])) is AppendStep
