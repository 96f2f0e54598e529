"""Bootstrap intervals against closed forms and a brute-force loop; rank correlation against its definition."""

import math
import random

import numpy as np
import pytest

from bpkv_trt.evaluation.bootstrap import Bootstrap
from bpkv_trt.evaluation.ranks import spearman


def test_the_mean_of_a_normal_sample_has_its_closed_form_interval() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, 400)
    found = Bootstrap(["task"] * 400).mean(values.tolist())
    half = 1.959964 * values.std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03 * half)


def test_it_is_what_a_plain_loop_over_strata_gives() -> None:
    generator = random.Random(1)
    strata = ["a"] * 12 + ["b"] * 5
    values = [generator.random() + 3 * (stratum == "b") for stratum in strata]
    means = []
    for _ in range(20_000):
        drawn = generator.choices(values[:12], k=12) + generator.choices(values[12:], k=5)
        means.append(sum(drawn) / 17)
    means.sort()
    found = Bootstrap(strata).mean(values)
    assert found.low is not None and found.high is not None
    assert (found.low, found.high) == pytest.approx((means[500], means[19_500]), abs=0.01)
    unstratified = Bootstrap(["a"] * 17).mean(values)
    assert unstratified.high is not None and unstratified.low is not None
    assert unstratified.high - unstratified.low > 1.5 * (found.high - found.low)


def test_ratios_divide_sums_and_skip_what_nothing_divides() -> None:
    found = Bootstrap(["t"] * 3).ratio([1, 0, 2], [2, 0, 2])
    assert found is not None and found.low is not None and found.high is not None
    assert found.value == 0.75 and 0.5 <= found.low <= found.high <= 1.0
    assert Bootstrap(["t"] * 2).ratio([0, 0], [0, 0]) is None


@pytest.mark.parametrize(
    ("strata", "wholes", "known"),
    [
        ("a", [1], False),
        ("abc", [1, 1, 1], False),
        ("aa", [1, 1], True),
        ("aab", [1, 1, 1], True),
        ("aab", [1, 0, 1], False),
        ("aaa", [3, 0, 2], True),
    ],
)
def test_there_is_an_interval_only_where_some_stratum_has_two_samples(
    strata: str, wholes: list[int], known: bool
) -> None:
    """One sample drawn from one is always that sample: an interval of no width would claim that nothing varies."""
    bootstrap = Bootstrap(list(strata))
    found = bootstrap.ratio([whole / 2 for whole in wholes], wholes)
    assert found is not None and found.value == 0.5
    assert (found.low, found.high) == ((0.5, 0.5) if known else (None, None))
    mean = bootstrap.mean([7] * len(strata))
    assert (mean.low is None) == (mean.high is None) == (len(set(strata)) == len(strata))


def test_the_same_samples_give_the_same_interval() -> None:
    first, second = (Bootstrap(["t"] * 9).mean(range(9)) for _ in range(2))
    assert first == second


def test_spearman_is_one_minus_the_squared_rank_distance() -> None:
    first, second = [0.3, 10.0, 2.0, 4.0, -1.0], [1.0, 2.0, 3.0, 4.0, 5.0]
    distance = sum((a - b) ** 2 for a, b in zip([1, 4, 2, 3, 0], range(5), strict=True))
    assert spearman(first, second) == pytest.approx(1 - 6 * distance / (5 * 24))
    assert spearman([1, 1, 2, 3], [1, 1, 2, 3]) == pytest.approx(1)
    assert spearman([1, 1, 2], [3, 3, 1]) == pytest.approx(-1)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
