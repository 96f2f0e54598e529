"""Neighbouring scores averaged, against a loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.core.pooling import neighbour_mean


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 30), kernel=st.sampled_from([1, 3, 5, 7, 63]), shape=st.sampled_from([(), (2,), (3, 2)]))
def test_it_is_the_mean_over_a_rows_neighbours_with_zeros_past_the_ends(
    rows: int, kernel: int, shape: tuple[int, ...]
) -> None:
    scores = torch.randn(*shape, rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    expected = torch.zeros_like(scores)
    for row in range(rows):
        for other in range(max(0, row - kernel // 2), min(rows, row + kernel // 2 + 1)):
            expected[..., row] += scores[..., other] / kernel
    pooled = neighbour_mean(scores, kernel)
    assert pooled.shape == scores.shape
    torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(neighbour_mean(scores.float(), kernel), expected.float(), rtol=1e-5, atol=1e-6)


def test_no_head_is_averaged_with_its_neighbour_and_a_kernel_of_1_changes_no_bit() -> None:
    scores = torch.zeros(2, 2, 4)
    scores[0, 0, 3] = 5.0
    assert neighbour_mean(scores, 5).nonzero().tolist() == [[0, 0, 1], [0, 0, 2], [0, 0, 3]]
    assert neighbour_mean(scores, 1) is scores


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_its_neighbours_and_no_others(value: float) -> None:
    scores = torch.ones(9)
    scores[4] = value
    assert (~torch.isfinite(neighbour_mean(scores, 3))).nonzero().flatten().tolist() == [3, 4, 5]
