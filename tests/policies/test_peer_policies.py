"""Peers that are not built on an observation window, against a plain loop in float64 over a ragged pool."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.quota import Quota
from bpkv_trt.policies.expected_attention import mean_rotation
from bpkv_trt.policies.registry import make_policy, settled
from bpkv_trt.pool import SequenceView
from tests.policies.conftest import (
    COMPACTABLE_HEADS,
    GROUP,
    TOKENS,
    TRAITS,
    WIDTH,
    make_config,
    make_statistics,
    scores_of,
)


def rotated(vector: Tensor, position: int, frequencies: Tensor) -> Tensor:
    """RoPE, pair by pair: components j and j + D/2 are one complex number turned by position x frequency."""
    half = vector.shape[-1] // 2
    pairs = torch.complex(vector[..., :half].double(), vector[..., half:].double())
    turned = pairs * torch.exp(1j * position * frequencies.double())
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_mean_rotation_is_the_mean_of_rotations() -> None:
    frequencies = 1 / 10_000 ** (2 * torch.arange(WIDTH // 2) / WIDTH)
    vectors = torch.randn(5, WIDTH)
    truth = torch.stack([rotated(vectors, position, frequencies) for position in range(1000, 1512)]).mean(0)
    assert torch.allclose((vectors @ mean_rotation(frequencies, 1000, 512).T).double(), truth, atol=1e-6)


def test_expected_attention_is_the_gaussian_mean_of_future_attention(view: SequenceView) -> None:
    statistics = make_statistics(view)
    moments = statistics.query_moments
    assert moments is not None
    scores = scores_of("expected_attention", view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        frequencies = moments.inverse_frequencies[layer]
        future = range(TOKENS, TOKENS + 512)
        images = torch.stack([rotated(torch.eye(WIDTH), position, frequencies) for position in future]).mean(0)
        rotation = images.T  # its columns are the images of the axes
        k, v = view.keys(layer, head).double()[4:], view.values(layer, head).double()[4:]
        attention = []
        for query in range(head * GROUP, (head + 1) * GROUP):
            mean = rotation @ moments.mean[layer, query].double()
            covariance = rotation @ moments.covariance[layer, query].double() @ rotation.T
            exponents = torch.stack([key @ mean / WIDTH**0.5 + key @ covariance @ key / WIDTH / 2 for key in k])
            attention.append(torch.softmax(exponents, 0))
        truth = (torch.stack(attention).mean(0) + 0.01) * v.norm(dim=1)
        n = int(view.lengths[layer, head])
        assert torch.allclose(scores[layer, head, 4:n].double(), truth, rtol=1e-4)
        assert bool((scores[layer, head, :4] > scores[layer, head, 4:n].max()).all())


def test_expected_attention_without_sinks_scores_every_row(view: SequenceView) -> None:
    scores = scores_of("expected_attention", view, make_statistics(view), sinks=0)
    assert bool(torch.isfinite(scores).all())
    with_sinks = scores_of("expected_attention", view, make_statistics(view))
    assert not torch.equal(scores[..., :4], with_sinks[..., :4])


def test_h2o_is_the_attention_received(view: SequenceView) -> None:
    statistics = make_statistics(view)
    received = statistics.received_attention
    assert received is not None and torch.equal(scores_of("h2o", view, statistics), received)


def test_observed_attention_is_the_mean_over_the_queries_that_could_see_the_entry(view: SequenceView) -> None:
    statistics = make_statistics(view)
    assert statistics.received_attention is not None
    scores = scores_of("observed_attention", view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        for row, position in enumerate(view.positions(layer, head).tolist()):
            queries = len(range(position, TOKENS))  # of the entry's own token and of every later one
            received = float(statistics.received_attention[layer, head, row])
            assert scores[layer, head, row].item() == pytest.approx(received / queries, rel=1e-6)


def test_streaming_llm_evicts_the_oldest(view: SequenceView) -> None:
    scores = scores_of("streaming_llm", view, make_statistics(view))
    for layer, head in COMPACTABLE_HEADS:
        assert scores[layer, head, : view.lengths[layer, head]].tolist() == view.positions(layer, head).tolist()


def test_random_repeats_itself_and_depends_on_seed_and_length_alone(view: SequenceView) -> None:
    first = scores_of("random", view, make_statistics(view), seed=3)
    torch.rand(7)  # other requests draw too
    assert torch.equal(scores_of("random", view, make_statistics(view), seed=3), first)
    assert not torch.equal(scores_of("random", view, make_statistics(view), seed=4), first)
    later = replace(view, logical_length=TOKENS + 1)
    assert not torch.equal(scores_of("random", later, make_statistics(view), seed=3), first)
    assert abs(float(first.mean()) - 0.5) < 0.1 and len(set(first.flatten().tolist())) == first.numel()


def test_full_evicts_nothing(view: SequenceView) -> None:
    policy = make_policy(settled(BpkvConfig(policy="full")), TRAITS)
    assert policy.evicts_nothing
    assert bool((policy.score(make_statistics(view), view) == 1).all())


@pytest.mark.parametrize(
    "name",
    [
        "random",
        "streaming_llm",
        "h2o",
        "observed_attention",
        "snapkv",
        "tova",
        "dropkv",
        "deferkv",
        "expected_attention",
    ],
)
def test_the_lowest_scores_go_and_the_rest_stays(view: SequenceView, name: str) -> None:
    policy = make_policy(make_config(name), TRAITS)
    statistics = make_statistics(view)
    scores = policy.score(statistics, view)
    rows = torch.arange(scores.shape[-1])
    lengths = torch.from_numpy(view.lengths)[..., None]
    eligible = (rows >= 4) & (rows < lengths - 8)
    eligible[1] = False
    unit = torch.tensor([[0, 1], [-1, -1], [2, 3]])
    quota = Quota(unit, torch.tensor([5, 4, 0, 1]), lengths[..., 0].long() * (unit >= 0))
    evict = policy.select(scores, eligible, quota, statistics, view).evict
    for unit, (layer, head) in enumerate(COMPACTABLE_HEADS):
        gone, may_go = evict[layer, head], eligible[layer, head]
        assert int(gone.sum()) == int(quota.evict[unit]) and not bool((gone & ~may_go).any())
        if bool(gone.any()):
            assert scores[layer, head][gone].max() <= scores[layer, head][may_go & ~gone].min()
