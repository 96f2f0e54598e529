import pytest
import torch

from bpkv_trt.core.topk import topk_distribution
from bpkv_trt.errors import NumericalError


def test_the_likeliest_ids_and_what_they_cover():
    logits = torch.randn(3, 50)
    full = torch.softmax(logits.double(), -1)
    ids, p, covered = topk_distribution(logits, 8, 50)
    for m in range(3):
        order = full[m].argsort(descending=True)[:8]
        assert ids[m].tolist() == order.tolist()
        torch.testing.assert_close(covered[m].double(), full[m, order].sum(), rtol=1e-6, atol=0)
        torch.testing.assert_close(p[m].double(), full[m, order] / full[m, order].sum(), rtol=1e-5, atol=1e-9)


def test_padding_rows_are_never_picked():
    logits = torch.randn(2, 64)
    logits[:, 50:] = 100.0
    ids, _, covered = topk_distribution(logits, 8, 50)
    assert (ids < 50).all() and (covered < 1).all()
    logits[:, 50:] = float("nan")  # what a padding row holds is nobody's business
    assert torch.equal(topk_distribution(logits, 8, 50).ids, ids)


def test_more_than_the_vocabulary_is_the_vocabulary():
    ids, p, covered = topk_distribution(torch.randn(2, 20), 64, 10)
    assert ids.shape == (2, 10) and sorted(ids[0].tolist()) == list(range(10))
    torch.testing.assert_close(p.sum(-1), torch.ones(2))
    torch.testing.assert_close(covered, torch.ones(2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_refused(bad):
    logits = torch.randn(2, 20)
    logits[1, 3] = bad
    with pytest.raises(NumericalError, match="NaN or infinite"):
        topk_distribution(logits, 4, 20)
