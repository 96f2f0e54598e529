"""Every peer's score against a plain loop in float64 over ragged heads of a pool that compaction has cut to pieces."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.statistics import ForwardStatistics, QueryMoments
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.policies.expected_attention import mean_rotation
from bpkv_trt.policies.registry import make_policy, settled
from bpkv_trt.pool import CompactionPlan, PagedKvPool, SequenceView

LAYERS, HEADS, GROUP, WIDTH, WINDOW, TOKENS = 3, 2, 2, 8, 4, 40
TRAITS = ModelTraits(
    architecture="test",
    layers=LAYERS,
    query_heads=HEADS * GROUP,
    kv_heads=HEADS,
    head_dim=WIDTH,
    width=16,
    vocabulary=50,
    attention_scale=WIDTH**-0.5,
    sliding_window=16,
    sliding_layers=frozenset({1}),
)
COMPACTABLE_HEADS = [(layer, head) for layer in TRAITS.compactable_layers for head in range(HEADS)]


@pytest.fixture
def view() -> SequenceView:
    torch.manual_seed(0)
    pool = PagedKvPool(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, pages=120, page_size=4, poison=True)
    sequence = pool.admit()
    pool.extend(sequence, TOKENS)
    for layer in range(LAYERS):
        pool.write(sequence, layer, *torch.randn(2, HEADS, TOKENS, WIDTH))
    gone = torch.rand(LAYERS, HEADS, TOKENS) < torch.tensor([[0.1, 0.5], [0.0, 0.0], [0.3, 0.7]])[..., None]
    gone[..., :4] = gone[..., -8:] = False
    pool.apply(CompactionPlan.from_eviction(pool.view(sequence), gone))
    assert len(set(pool.lengths(sequence).ravel().tolist())) > 2
    return pool.view(sequence)


def make_statistics(view: SequenceView) -> ForwardStatistics:
    query_heads = HEADS * GROUP
    exponents = 2 * torch.arange(WIDTH // 2) / WIDTH
    draws = torch.randn(LAYERS, query_heads, 3 * WIDTH, WIDTH)
    return ForwardStatistics(
        q=torch.randn(LAYERS, WINDOW, query_heads, WIDTH) * 3,
        context=torch.randn(LAYERS, WINDOW, query_heads, WIDTH),
        residual=torch.randn(WINDOW, 16),
        topk_ids=torch.zeros(WINDOW, 5, dtype=torch.int64),
        topk_p=torch.full((WINDOW, 5), 0.2),
        covered_mass=torch.ones(WINDOW),
        positions=torch.arange(TOKENS - WINDOW, TOKENS),
        received_attention=torch.rand(LAYERS, HEADS, int(view.lengths.max())),
        query_moments=QueryMoments(
            mean=draws.mean(2),
            covariance=draws.mT @ draws / draws.shape[2],
            inverse_frequencies=tuple(10.0 ** -(layer + exponents) for layer in range(LAYERS)),
        ),
    )


def scores_of(
    name: str, view: SequenceView, statistics: ForwardStatistics, traits: ModelTraits = TRAITS, **options: int
) -> Tensor:
    config = settled(BpkvConfig(policy=name, positions=WINDOW, recent=8, **options))
    scores = make_policy(config, traits).score(statistics, view)
    assert scores.shape == (LAYERS, HEADS, int(view.lengths.max())) and scores.dtype == torch.float32
    return scores


def window_attention(view: SequenceView, statistics: ForwardStatistics, layer: int, head: int, query: int) -> Tensor:
    """[M, n] float64 weights of one query head, one position at a time."""
    k = view.keys(layer, head).double()
    weights = torch.zeros(WINDOW, k.shape[0], dtype=torch.float64)
    for m in range(WINDOW):
        seen = k.shape[0] - (WINDOW - 1 - m)
        logits = k[:seen] @ statistics.q[layer, m, query].double() / math.sqrt(WIDTH)
        weights[m, :seen] = (logits - logits.logsumexp(0)).exp()
    return weights


def test_snapkv_pools_the_mean_window_attention_of_the_group(view: SequenceView) -> None:
    statistics = make_statistics(view)
    scores = scores_of("snapkv", view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        n = int(view.lengths[layer, head])
        queries = range(head * GROUP, (head + 1) * GROUP)
        observed = torch.stack([window_attention(view, statistics, layer, head, query) for query in queries])
        prefix = observed.mean((0, 1))[: n - WINDOW].tolist()
        for row in range(n - WINDOW):
            pooled = sum(prefix[max(0, row - 2) : row + 3]) / 5  # zeros past the ends count
            assert scores[layer, head, row].item() == pytest.approx(pooled, rel=1e-5)
        assert bool((scores[layer, head, n - WINDOW : n] > scores[layer, head, : n - WINDOW].max()).all())


def test_snapkv_uses_the_softcap_and_sink_logits_of_the_model(view: SequenceView) -> None:
    plain = make_statistics(view)
    capped = scores_of("snapkv", view, plain, replace(TRAITS, attention_softcap=2.0))
    assert not torch.allclose(capped, scores_of("snapkv", view, plain))
    sunk = replace(plain, sink_logits=torch.full((LAYERS, HEADS * GROUP), 50.0))  # all attention goes to the sink
    scores = scores_of("snapkv", view, sunk, replace(TRAITS, sink_logits=True))
    for layer, head in COMPACTABLE_HEADS:
        assert bool((scores[layer, head, : view.lengths[layer, head] - WINDOW] < 1e-9).all())


def test_snapkv_of_nothing_but_a_window() -> None:
    torch.manual_seed(0)
    pool = PagedKvPool(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, pages=20, page_size=4, poison=True)
    sequence = pool.admit()
    pool.extend(sequence, WINDOW)
    for layer in range(LAYERS):
        pool.write(sequence, layer, *torch.randn(2, HEADS, WINDOW, WIDTH))
    short = pool.view(sequence)
    scores = scores_of("snapkv", short, make_statistics(short))
    assert bool((scores[list(TRAITS.compactable_layers)] == 1).all())


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
    policy = make_policy(BpkvConfig(policy="full"), TRAITS)
    assert policy.evicts_nothing
    assert bool((policy.score(make_statistics(view), view) == 1).all())


@pytest.mark.parametrize("name", ["random", "streaming_llm", "snapkv", "h2o", "expected_attention"])
def test_the_lowest_scores_go_and_the_rest_stays(view: SequenceView, name: str) -> None:
    policy = make_policy(settled(BpkvConfig(policy=name, positions=WINDOW, recent=8)), TRAITS)
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
