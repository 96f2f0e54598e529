"""Draws against exact probabilities."""

import math

import pytest
import torch

from bpkv_trt.errors import ConfigError
from bpkv_trt.runtime.sampling import Sampler, SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.5, -1.0, 0.5, 2.0, -math.inf])
DRAWS = 2_000
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}  # the 99.9 % quantile by degrees of freedom


def exact(temperature: float, top_p: float) -> dict[int, float]:
    """Token probabilities, from the definition: the fewest most likely tokens that hold top_p, renormalised."""
    powers = [math.exp(float(logit) / temperature) for logit in LOGITS]
    p = {token: power / sum(powers) for token, power in enumerate(powers)}
    nucleus, held = {}, 0.0
    for token in sorted(p, key=lambda token: -p[token]):
        if held >= top_p or p[token] == 0:
            break
        nucleus[token], held = p[token], held + p[token]
    return {token: value / held for token, value in nucleus.items()}


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.9), (1.0, 0.5), (2.0, 0.7)]
)
def test_draws_follow_the_nucleus(temperature: float, top_p: float) -> None:
    sampler = Sampler(SamplingParams(1, temperature=temperature, top_p=top_p, seed=11))
    counts = dict.fromkeys(range(len(LOGITS)), 0)
    for _ in range(DRAWS):
        counts[sampler.next(LOGITS)] += 1
    expected = exact(temperature, top_p)
    assert {token for token, count in counts.items() if count} <= expected.keys()
    chi_square = sum((counts[token] - DRAWS * p) ** 2 / (DRAWS * p) for token, p in expected.items())
    assert chi_square < CHI_SQUARE_999[len(expected) - 1]


def test_a_small_top_p_is_greedy_and_so_is_temperature_0() -> None:
    for params in (SamplingParams(1, temperature=1.0, top_p=1e-9), SamplingParams(1)):
        assert {Sampler(params).next(LOGITS) for _ in range(20)} == {1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_temperatures_near_0_tend_to_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(1, temperature=temperature))
    assert {sampler.next(LOGITS) for _ in range(20)} == {1}


def test_a_seed_repeats_itself_and_samplers_do_not_influence_one_another() -> None:
    params = SamplingParams(1, temperature=1.0, seed=5)
    alone = Sampler(params)
    first = [alone.next(LOGITS) for _ in range(50)]
    mine, other = Sampler(params), Sampler(SamplingParams(1, temperature=1.0, seed=6))
    second, others = zip(*[(mine.next(LOGITS), other.next(LOGITS)) for _ in range(50)], strict=True)
    assert first == list(second) and first != list(others)


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_new_tokens", 0), ("max_new_tokens", -1)]
    + [("temperature", value) for value in (-0.1, math.nan, math.inf)]
    + [("top_p", value) for value in (0.0, -0.5, 1.1, math.nan)],
)
def test_invalid_options_are_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        SamplingParams(**{"max_new_tokens": 1, option: value})


def test_a_nucleus_is_refused_where_only_the_most_probable_token_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"top_p is 0\.9 and temperature is 0"):
        SamplingParams(1, top_p=0.9)
