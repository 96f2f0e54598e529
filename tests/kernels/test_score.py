from dataclasses import replace

import pytest
import torch

from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.score import singleton_scores
from tests.kernels.attended import Attended
from tests.kernels.scored import readings, truth

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SCALES = {"key_scale": 0.3, "value_scale": 0.2}
LARGEST = torch.finfo(torch.float32).max


def arguments(attended, channels, **options):
    """What the kernels take."""
    return (
        readings(attended, channels, **options)
        | {
            "offsets": attended.offsets,
            "cache": attended.laid.cache,
            "lse": log_sum_exp(attended.q, attended.offsets, attended.laid.cache, **attended.options),
            "longest": int(attended.laid.cache.lengths.max()) + 3,
        }
        | attended.options
    )


def assert_scores(given, expected, allowed):
    result = singleton_scores(**given).cpu().double()
    assert expected.any() and (result[expected == 0] == 0).all()
    held = expected > 0
    excess = ((result - expected).abs() / allowed)[held].max()
    assert excess < 1, f"{excess:.1f} times the allowed error"


@pytest.mark.parametrize(
    "shape, channels, probes",
    [
        ({"cache": BF16, "queries": BF16, "group": 4, "head_dim": 64, "page_size": 32}, 3, False),
        ({"cache": FP16, "queries": FP16, "group": 3, "head_dim": 96, "page_size": 64}, 1, True),
        ({"cache": FP8, "queries": BF16, "group": 1, "shared_pages": True, **SCALES}, 2, True),
        ({"cache": torch.int8, "queries": FP16, "page_size": 128, **SCALES}, 2, False),
        ({"shared_pages": True, "options": {"softcap": 5.0, "window": 20}}, 2, False),
        ({"group": 7, "cache": BF16, "options": {"softcap": 3.0}}, 1, True),
    ],
    ids=str,
)
def test_scores_are_those_of_the_core(device, shape, channels, probes):
    attended = Attended.random([[40, 33], [130, 20], [6, 60]], [3, 0, 2], device=device, sharpness=2.0, **shape)
    given = arguments(attended, channels, probes=probes)
    assert_scores(given, *truth(attended, given, given["longest"]))


@pytest.mark.parametrize(
    "counts, channels, probes", [([16], 32, False), ([40], 1, True)], ids=["32 logits", "a probe at 40 positions"]
)
def test_the_usual_sizes(device, counts, channels, probes):
    sizes = {"group": 4, "head_dim": 128, "cache": FP16, "queries": FP16, "page_size": 32}
    attended = Attended.random([[90]], counts, device=device, sharpness=2.0, **sizes)
    given = arguments(attended, channels, probes=probes)
    assert_scores(given, *truth(attended, given, given["longest"]))


@pytest.mark.parametrize("probes", [False, True])
def test_the_smallest_scores_keep_their_digits(device, probes):
    # Context and values have more in common than not.
    attended = Attended.random([[100]], [4], device=device, sharpness=2.0, common=2.0, head_dim=64)
    given = arguments(attended, 4, probes=probes, readout_scale=1e-5)
    expected, _ = truth(attended, given, given["longest"])
    assert expected[expected > 0].median() < 1e-12
    assert_scores(given, expected, 1e-5 * expected)


def test_shifts_of_every_size(device):
    # From the series through e^x and log(1 + x) to shifts beyond fp32's e^x.
    attended = Attended.random([[60]], [2], device=device, sharpness=2.0)
    given = arguments(attended, 4, readout_scale=3.0)
    expected, allowed = truth(attended, given, given["longest"])
    assert_scores(given, expected, allowed)
    assert expected[expected > 0].min() < 1e-3 and expected.max() > 1
    given["readout"] *= 1e4
    result = singleton_scores(**given).cpu()
    assert result.isfinite().all() and result.max() > 70


def test_an_entry_that_is_all_of_some_attention_goes_last(device):
    attended = Attended.random([[40]], [2], device=device, sharpness=0.0)
    attended.keys[0][0][7] = attended.q[1, 1].cpu() * 1e3
    attended = replace(attended, options=attended.options | {"scale": 1.0})
    scores = singleton_scores(**arguments(attended, 2)).cpu()[0, 0]
    assert scores[7] == LARGEST and (scores[:40] < LARGEST).sum() == 39


def test_all_heads_of_a_sequence_may_have_one_length(device):
    attended = Attended.random([[40, 40], [130, 130]], [3, 2], device=device, shared_pages=True)
    assert attended.laid.cache.length_strides == (1, 0)
    given = arguments(attended, 2)
    assert_scores(given, *truth(attended, given, given["longest"]))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("spoilt", ["q", "keys", "values", "readout", "context"])
@pytest.mark.parametrize("probes", [False, True])
def test_a_nan_comes_through(device, spoilt, probes):
    attended = Attended.random([[40, 30]], [2], device=device)
    if spoilt in ("keys", "values"):
        getattr(attended, spoilt)[0][1][9, 3] = torch.nan
        attended = replace(attended)  # laid out again
    elif spoilt == "q":
        attended.q[1, 2, 3] = torch.nan
    given = arguments(attended, 2, probes=probes)
    if spoilt in ("readout", "context"):
        given[spoilt][1, ..., 2, 3] = torch.nan
    scores = singleton_scores(**given).cpu()[0]
    assert scores[1, 9].isnan() and not scores[0].isnan().any() and not scores[1, 30:].isnan().any()


def test_without_positions_every_score_is_0(device):
    attended = Attended.random([[20]], [1], device=device)
    given = arguments(attended, 2)
    given["offsets"] = torch.zeros_like(given["offsets"])
    none = {name: given[name][:0] for name in ("q", "context", "readout", "p", "weights", "lse")}
    assert (singleton_scores(**given | none) == 0).all()


@pytest.mark.parametrize(
    "name, change, error, said",
    [
        ("context", lambda x: x[:1], ValueError, r"context has shape \(1, 4, 16\)"),
        ("readout", lambda x: x.double(), TypeError, "readout is torch.float64"),
        ("readout", lambda x: x.half(), TypeError, "rounded"),
        ("readout", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "readout has strides"),
        ("p", lambda x: x[:, :1], ValueError, "p has shape"),
        ("weights", lambda x: x.half(), TypeError, "weights is torch.float16"),
        ("lse", lambda x: x.T, ValueError, "lse has shape"),
        ("offsets", lambda x: x.long(), TypeError, "offsets is torch.int64"),
        ("readout", lambda x: x[:, :0], ValueError, r"readout has shape \(2, 0, 4, 16\); expected at least 1 channel"),
        ("q", lambda x: x[:, :0], ValueError, "q has 0 heads"),
        ("softcap", lambda _: torch.inf, ValueError, "softcap is inf"),
        ("longest", lambda _: -1, ValueError, "longest is -1; expected at least 0"),
        ("longest", float, TypeError, "longest is a float; expected an int"),
    ],
)
def test_what_does_not_fit_is_refused(device, name, change, error, said):
    attended = Attended.random([[20, 20]], [2], device=device)
    given = arguments(attended, 3)
    with pytest.raises(error, match=said):
        singleton_scores(**given | {name: change(given.get(name))})


def test_probes_without_channels_are_refused(device):
    given = arguments(Attended.random([[20, 20]], [2], device=device), 3)
    with pytest.raises(ValueError, match="expected at least 1 channel"):
        singleton_scores(**given | {"p": None, "readout": given["readout"][:, :0]})
