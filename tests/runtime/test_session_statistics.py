"""Scores of several runs, added up."""

import torch

from bpkv_trt.runtime.session_statistics import _sum

LARGEST = torch.finfo(torch.float32).max


def test_an_entry_that_is_all_a_head_attends_to_stays_finite_in_a_sum() -> None:
    """It has the largest finite score in every run: kept for certain, and no reason to keep everything."""
    first = torch.tensor([[[LARGEST, LARGEST, 1e-11, 0.5]]])
    second = torch.tensor([[[LARGEST, 1e-9, 2e-11, 0.25, 0.125]]])
    expected = torch.tensor([[[LARGEST, LARGEST, 3e-11, 0.75, 0.125]]])
    torch.testing.assert_close(_sum(second, first), expected, rtol=1e-6, atol=0)


def test_what_is_no_number_stays_so() -> None:
    first, second = torch.tensor([[[torch.nan, torch.inf, 1.0]]]), torch.tensor([[[1.0, 1.0, torch.inf]]])
    total = _sum(second, first)
    assert total[0, 0, 0].isnan() and total[0, 0, 1:].isinf().all()
