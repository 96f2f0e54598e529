"""What a rehearsal tells of the entries that were not rehearsed, against a ridge regression by least squares."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.core.rehearsal import LEAST, RIDGE, Rehearsal, carried_over
from tests.core.conftest import Rows, Sequence, make_sequence

LAYERS, HEADS, DIM = 3, 2, 4
LENGTHS = [[60, 47], [12, 12], [55, 60]]
OUTSIDE = 1  # a layer with a window, which holds its last rows only
FEATURES = 2 * DIM + 2
REHEARSED = {
    "one": [20],
    "fewer than features": [3, 4, 5, 30],
    "some": [*range(2, 12), *range(25, 35)],
    "most": [*range(47)],
}


def ragged(dtype: torch.dtype = torch.float32, lengths: list[list[int]] = LENGTHS) -> Sequence:
    sequence = make_sequence(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, rows=lengths)
    sequence.view = Rows(
        *([[rows.to(dtype) for rows in heads] for heads in of] for of in (sequence.view.k, sequence.view.v))
    )
    sequence.traits = replace(sequence.traits, sliding_layers=frozenset({OUTSIDE}), sliding_window=12)
    return sequence


def measured(positions: list[int]) -> Rehearsal:
    """Attention over many orders of magnitude; layers outside the budget have none."""
    draw = torch.Generator().manual_seed(1)
    attention = torch.sigmoid(torch.randn(LAYERS, HEADS, len(positions), generator=draw) * 4 - 4)
    attention[OUTSIDE] = 0
    return Rehearsal(torch.tensor(positions), attention)


def by_least_squares(k: Tensor, v: Tensor, rows: list[int], known: NDArray[np.float64]) -> NDArray[np.float64]:
    """min |X w - y|^2 + r |w|^2, of standardised features and centred y, is least squares with sqrt(r) I below X."""
    k, v = k.double(), v.double()
    x = torch.cat([k, v, k.square().sum(1, True).sqrt(), v.square().sum(1, True).sqrt()], 1).numpy()
    varied = np.ptp(x[rows], axis=0) > 0
    x = (x - x[rows].mean(0)) / np.where(varied, x[rows].std(0), 1) * varied  # what never varies says nothing
    above, below = x[rows], np.sqrt(RIDGE) * np.eye(x.shape[1])
    w, *_ = np.linalg.lstsq(
        np.vstack([above, below]), np.append(known - known.mean(), np.zeros(len(below))), rcond=None
    )
    estimate: NDArray[np.float64] = x @ w + known.mean()
    estimate[rows] = known
    return estimate


def assert_carried_over(sequence: Sequence, rehearsal: Rehearsal) -> None:
    ours, rows = carried_over(rehearsal, sequence.view, sequence.traits), rehearsal.positions.tolist()
    assert ours.shape == (LAYERS, HEADS, sequence.view.lengths.max()) and ours.dtype == torch.float32
    assert ours.isfinite().all() and ours[OUTSIDE].eq(0).all()
    for layer in sequence.traits.compactable_layers:
        for head in range(HEADS):
            k, v = sequence.view.keys(layer, head), sequence.view.values(layer, head)
            known = np.log(np.maximum(rehearsal.attention[layer, head].double().numpy(), LEAST))
            truth = by_least_squares(k, v, rows, known)
            np.testing.assert_allclose(ours[layer, head, : len(truth)].numpy(), truth, rtol=1e-3, atol=1e-3)
            assert ours[layer, head, len(truth) :].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", REHEARSED.values(), ids=REHEARSED)
def test_each_head_carries_its_attention_over_by_a_ridge_regression(positions: list[int], dtype: torch.dtype) -> None:
    """Heads of several lengths; from one entry to nearly all, and fewer than a head has features."""
    assert len(REHEARSED["fewer than features"]) < FEATURES < len(REHEARSED["some"])
    assert_carried_over(ragged(dtype), measured(positions))


def test_what_was_measured_stands() -> None:
    """Whether or not the regression would say so: with every entry rehearsed nothing is estimated."""
    sequence = ragged(lengths=[[40, 40], [12, 12], [40, 40]])
    rehearsal = measured(list(range(40)))
    ours = carried_over(rehearsal, sequence.view, sequence.traits)
    for layer in sequence.traits.compactable_layers:
        torch.testing.assert_close(ours[layer], rehearsal.attention[layer].clamp(LEAST).log(), rtol=1e-6, atol=0)


def test_no_attention_counts_as_the_least() -> None:
    """Which underflows for some entries, and for all of a head that looks elsewhere; the logarithm stays finite."""
    rehearsal, sequence = measured(REHEARSED["some"]), ragged()
    rehearsal.attention[0, 0, ::3] = 0
    rehearsal.attention[2, 1] = 0
    rehearsal.attention[2, 0, 0] = LEAST / 2
    assert_carried_over(sequence, rehearsal)
    ours = carried_over(rehearsal, sequence.view, sequence.traits)
    torch.testing.assert_close(ours[2, 1], torch.full((60,), LEAST).log())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.1, 30.0])
def test_a_feature_that_does_not_vary_where_it_was_rehearsed_has_no_say(value: float, elsewhere: bool) -> None:
    """A dead channel, as trained models have, and one that is alive in the other rows only."""
    sequence, rehearsal = ragged(), measured(REHEARSED["some"])
    for layer in sequence.traits.compactable_layers:
        for head in range(HEADS):
            sequence.view.k[layer][head][rehearsal.positions if elsewhere else slice(None), 1] = value
            sequence.view.v[layer][head][rehearsal.positions if elsewhere else slice(None), 2] = value
    assert_carried_over(sequence, rehearsal)


def test_heads_know_nothing_of_one_another() -> None:
    sequence, rehearsal = ragged(), measured(REHEARSED["some"])
    before = carried_over(rehearsal, sequence.view, sequence.traits)
    rehearsal.attention[0, 1] = rehearsal.attention[0, 1].flip(0)
    sequence.view.k[0][1] *= 3
    after = carried_over(rehearsal, sequence.view, sequence.traits)
    same = torch.ones(LAYERS, HEADS, dtype=torch.bool)
    same[0, 1] = False
    assert torch.equal(before[same], after[same]) and not torch.allclose(before[0, 1], after[0, 1])
