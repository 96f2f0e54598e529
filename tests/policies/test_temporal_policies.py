"""R-KV's score and the rules of running attention, against plain float64 loops."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.errors import ConfigError
from bpkv_trt.policies import rkv
from bpkv_trt.policies.registry import policy_class, settled
from bpkv_trt.policies.rkv import redundancy
from bpkv_trt.pool import SequenceView
from tests.policies.conftest import (
    COMPACTABLE_HEADS,
    GROUP,
    TRAITS,
    WIDTH,
    WINDOW,
    make_statistics,
    scores_of,
)


def true_redundancy(keys: Tensor) -> list[float]:
    """A row at a time: cosines to the others, the last one above 0.5 (else the first row's) left out."""
    unit = [key / key.norm() for key in keys.double()]
    sums = [0.0] * len(unit)
    for own, one in enumerate(unit):
        cosines = [0.0 if own == row else float(one @ other) for row, other in enumerate(unit)]
        cosines[max((row for row, cosine in enumerate(cosines) if cosine > 0.5), default=0)] = 0.0
        sums = [total + cosine for total, cosine in zip(sums, cosines, strict=True)]
    exponents = [math.exp(total / len(unit)) for total in sums]
    return [exponent / sum(exponents) for exponent in exponents]


def true_importance(view: SequenceView, statistics: ForwardStatistics, layer: int, head: int) -> list[float]:
    """Softmax over the rows before the window of the group's largest logits, mean over positions, maximum of 7."""
    earlier = view.keys(layer, head).double()[:-WINDOW]
    mean = torch.zeros(earlier.shape[0], dtype=torch.float64)
    for m in range(WINDOW):
        logits = [
            earlier @ statistics.q[layer, m, query].double() / math.sqrt(WIDTH)
            for query in range(head * GROUP, (head + 1) * GROUP)
        ]
        largest = torch.stack(logits).amax(0)
        mean += (largest - largest.logsumexp(0)).exp() / WINDOW
    return [max(mean.tolist()[max(0, row - 3) : row + 4]) for row in range(len(mean))]


def test_rkv_weighs_importance_against_redundancy(view: SequenceView) -> None:
    statistics = make_statistics(view)
    scores = scores_of("rkv", view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        n = int(view.lengths[layer, head])
        importance, alike = true_importance(view, statistics, layer, head), true_redundancy(view.keys(layer, head))
        for row in range(n - WINDOW):
            truth = 0.07 * importance[row] - 0.93 * alike[row]
            assert scores[layer, head, row].item() == pytest.approx(truth, rel=1e-4, abs=1e-7)
        assert bool((scores[layer, head, n - WINDOW : n] > scores[layer, head, : n - WINDOW].max()).all())


def test_of_like_keys_the_newest_stays() -> None:
    torch.manual_seed(0)
    keys = torch.randn(30, WIDTH)
    keys[[3, 11, 20]] = torch.randn(WIDTH) * torch.tensor([[1.0], [2.0], [0.5]])
    scores = redundancy(keys)
    assert scores[20] < scores[11] and scores[20] < scores[3]
    assert scores.sum().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("block", [1, 7, 30, 64])
def test_redundancy_does_not_depend_on_its_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than `block` rows of cosines exist at once."""
    torch.manual_seed(1)
    keys = torch.randn(30, WIDTH)
    monkeypatch.setattr(rkv, "BLOCK", block)
    assert redundancy(keys).tolist() == pytest.approx(true_redundancy(keys), rel=1e-5)


def test_a_key_of_zeros_is_like_none() -> None:
    keys = torch.cat([torch.zeros(1, WIDTH), torch.randn(9, WIDTH)])
    assert bool(torch.isfinite(redundancy(keys)).all())


def test_rkv_uses_the_softcap_of_the_model(view: SequenceView) -> None:
    statistics = make_statistics(view)
    capped = scores_of("rkv", view, statistics, replace(TRAITS, attention_softcap=2.0))
    assert not torch.allclose(capped, scores_of("rkv", view, statistics))


def test_rkv_of_nothing_but_a_window(window_only: SequenceView) -> None:
    scores = scores_of("rkv", window_only, make_statistics(window_only))
    assert bool((scores[list(TRAITS.compactable_layers)] == 1).all())


@pytest.mark.parametrize(
    ("rule", "decoded", "carry", "weights"),
    [
        (RunningAttention(), None, 1.0, [1, 1, 1, 1]),
        (RunningAttention(), 5, 1.0, [1, 1, 1, 1]),
        (RunningAttention(decay=0.5), 5, 1 / 16, [1 / 16, 1 / 8, 1 / 4, 1 / 2]),
        (RunningAttention(decay=0.5, every=2), None, 1 / 16, [1 / 16, 1 / 8, 1 / 4, 1 / 2]),
        (RunningAttention(decay=0.5, every=2), 0, 1 / 16, [0, 3 / 16, 0, 3 / 4]),  # steps 1 to 4
        (RunningAttention(decay=0.5, every=3), 3, 1 / 8, [0, 0, 7 / 8, 0]),  # steps 4 to 7
        (RunningAttention(decay=0.5, steps=1), 0, 1 / 2, [1 / 2, 0, 0, 0]),
        (RunningAttention(decay=0.5, steps=1), 1, 1.0, [0, 0, 0, 0]),
        (RunningAttention(steps=2), 0, 1.0, [1, 1, 0, 0]),
    ],
)
def test_which_queries_count_and_how_much(
    rule: RunningAttention, decoded: int | None, carry: float, weights: list[float]
) -> None:
    kept, counted = rule.contributions(4, decoded)
    assert kept == carry and counted.tolist() == weights


@pytest.mark.parametrize("name", ["inertiakv", "inertiakv_lazy", "inertiakv_score_free"])
def test_inertiakv_scores_by_its_running_attention(view: SequenceView, name: str) -> None:
    statistics = make_statistics(view)
    received = statistics.received_attention
    scores = scores_of(name, view, statistics, regime="generation")  # type: ignore[arg-type]
    assert received is not None and torch.equal(scores, received)
    rule = policy_class(name).running_attention
    assert rule.decay == 0.9 and (rule.every, rule.steps) == {
        "inertiakv": (1, None),
        "inertiakv_lazy": (8, None),
        "inertiakv_score_free": (1, 1),
    }.get(name)
    assert settled(BpkvConfig(policy=name)).regime == ("deferred", "generation")


def test_what_a_schedule_excludes_is_refused() -> None:
    with pytest.raises(ConfigError, match="regime is prefill, which the policy inertiakv_score_free cannot have"):
        settled(BpkvConfig(policy="inertiakv_score_free", regime="prefill"))
    with pytest.raises(ConfigError, match="regime is generation, which the policy kvzip cannot have"):
        settled(BpkvConfig(policy="kvzip", regime="generation"))
    assert settled(BpkvConfig(policy="kvzip")).regime == ("prefill",)


def test_ripplekv_wants_a_table_and_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match="layer_table is not given.*`bpkv layer-table --model M --output table.json`"):
        settled(BpkvConfig(policy="ripplekv"))
    assert settled(BpkvConfig(policy="ripplekv", layer_table="table.json")).scope == "head"


def test_ripplekv_scores_as_snapkv_does(view: SequenceView) -> None:
    statistics = make_statistics(view)
    scores = scores_of("ripplekv", view, statistics, layer_table="table.json")  # type: ignore[arg-type]
    assert torch.equal(scores, scores_of("snapkv", view, statistics))
