from dataclasses import replace

import pytest
import torch

from bpkv_trt.kernels.launch import recorded
from bpkv_trt.kernels.lse import log_sum_exp
from tests.kernels.attended import Attended

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def kernel_and_truth(attended):
    result = log_sum_exp(attended.q, attended.offsets, attended.laid.cache, **attended.options).cpu()
    truth = torch.full(result.shape, torch.nan, dtype=torch.float64)
    for sequence, heads in enumerate(attended.keys):
        group = result.shape[1] // len(heads)
        for head in range(len(heads)):
            columns = slice(head * group, (head + 1) * group)
            truth[attended.sequence(sequence), columns] = attended.logits(sequence, head).logsumexp(-1).T
    return result, truth


@pytest.mark.parametrize(
    "shape",
    [
        {"cache": BF16, "queries": BF16, "group": 4, "head_dim": 128, "page_size": 32},
        {"cache": FP16, "queries": FP16, "group": 3, "head_dim": 96, "page_size": 64},
        {"cache": FP8, "queries": BF16, "group": 1, "key_scale": 0.3, "shared_pages": True},
        {"cache": torch.int8, "queries": FP16, "key_scale": 0.05, "page_size": 128},
        {"group": 7, "shared_pages": True, "options": {"softcap": 5.0}},
        {"options": {"window": 20}},
        {"options": {"softcap": 2.0, "window": 1}, "shared_pages": True},
    ],
    ids=str,
)
def test_it_is_that_of_the_rows_each_position_sees(device, shape):
    attended = Attended.random([[150, 41], [9, 128], [6, 33]], [5, 0, 3], device=device, sharpness=4.0, **shape)
    result, truth = kernel_and_truth(attended)
    torch.testing.assert_close(result.double(), truth, rtol=5e-7, atol=2e-6)


def test_positions_beyond_one_block_and_rows_beyond_one_split(device):
    # 40 positions of 4 query heads are 3 blocks; 1100 rows are 18 tiles, in 3 splits.
    attended = Attended.random([[1100], [40]], [40, 1], device=device, group=4, sharpness=8.0)
    result, truth = kernel_and_truth(attended)
    torch.testing.assert_close(result.double(), truth, rtol=5e-7, atol=2e-6)


def test_a_position_that_sees_nothing_has_none(device):
    attended = Attended.random([[2]], [3], device=device)
    result, truth = kernel_and_truth(attended)
    assert (result[0] == -torch.inf).all()
    torch.testing.assert_close(result.double(), truth, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_a_nan_comes_through_where_it_is_seen(device):
    attended = Attended.random([[140, 140]], [3], device=device)
    attended.q[1, 3] = torch.nan
    spoilt = torch.zeros(3, 4, dtype=torch.bool)
    spoilt[1, 3] = True
    result, _ = kernel_and_truth(attended)
    assert torch.equal(result.isnan(), spoilt)


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"q": torch.zeros(3, 4, 8)}, ValueError, r"q has shape \(3, 4, 8\); expected \(any, any, 16\)"),
        ({"q": torch.zeros(3, 3, 16)}, ValueError, "multiple of the cache's 2"),
        ({"q": torch.zeros(3, 4, 16).double()}, TypeError, "q is torch.float64"),
        ({"q": torch.zeros(3, 4, 16).half()}, TypeError, "rounded"),
        ({"q": torch.zeros(4, 3, 16).mT.contiguous().mT.transpose(0, 1)}, ValueError, "q has strides"),
        ({"offsets": torch.zeros(2)}, TypeError, "offsets is torch.float32"),
        ({"positions": 0}, ValueError, "positions is 0"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0"),
        ({"window": 0}, ValueError, "window is 0; expected at least 1"),
        ({"q": [0.0]}, TypeError, "q is a list; expected a tensor"),
        ({"q": torch.zeros(3, 0, 16)}, ValueError, "q has 0 heads"),
        ({"q": torch.zeros(3, 130, 16)}, ValueError, "q has 130 heads; expected a multiple of the cache's 2, 1 to 64"),
        ({"softcap": torch.inf}, ValueError, "softcap is inf; expected a finite number"),
        ({"softcap": torch.nan}, ValueError, "softcap is nan"),
        ({"softcap": 1e39}, ValueError, "softcap is 1e\\+39"),
        ({"softcap": "1"}, TypeError, "softcap is a str; expected a number"),
        ({"scale": torch.inf}, ValueError, "scale is inf"),
        ({"scale": None}, TypeError, "scale is a NoneType; expected a number"),
        ({"scale": "1"}, TypeError, "scale is a str"),
        ({"window": 2.0}, TypeError, "window is a float; expected an int"),
        ({"positions": 3.0}, TypeError, "positions is a float; expected an int"),
    ],
)
def test_what_does_not_fit_is_refused(device, change, error, said):
    attended = Attended.random([[20, 20]], [3], device=device)
    given = {"q": attended.q, "offsets": attended.offsets, "cache": attended.laid.cache} | attended.options
    with pytest.raises(error, match=said):
        log_sum_exp(**given | {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()})


def test_tensors_without_memory_are_refused_unless_nothing_runs(device):
    held = Attended.random([[20, 20]], [3], device=device).laid.cache
    tensors = ("addresses", "key_pages", "value_pages", "lengths")
    cache = replace(held, **{name: getattr(held, name).to("meta") for name in tensors})
    q, offsets = torch.zeros(3, 4, 16, device="meta"), torch.zeros(2, dtype=torch.int32, device="meta")
    with recorded() as notes:
        log_sum_exp(q, offsets, cache, scale=1.0, positions=3)
    assert len(notes) == 2
    with pytest.raises(ValueError, match="partial_log_sum_exp has tensors on meta; expected only within `recorded`"):
        log_sum_exp(q, offsets, cache, scale=1.0, positions=3)
