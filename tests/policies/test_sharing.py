"""How policies share a budget out: totals are exact, floors hold, and what is kept is what a plain sort would keep."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.core.budget import Budget, ResolvedBudget, resolve
from bpkv_trt.core.quota import Quota, quotas
from bpkv_trt.policies.pyramidkv import pyramid
from bpkv_trt.policies.registry import make_policy
from bpkv_trt.pool import SequenceView
from tests.policies.conftest import (
    COMPACTABLE_HEADS,
    TRAITS,
    WINDOW,
    make_config,
    make_statistics,
    pooled_attention,
    scores_of,
)


def resolved(budget: str, tokens: int, layers: int, protected: int, kv_heads: int = 2) -> ResolvedBudget:
    return resolve(
        Budget.parse(budget),
        tokens=tokens,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=4,
        itemsize=4,
        protected=protected,
    )


def published_pyramid(per_head: float, tokens: int, window: int, layers: int) -> list[float]:
    """PyramidKV's shares as its paper and kvpress have them, in floating point."""
    lowest = per_head / 20
    highest = per_head * 2 - lowest
    if highest >= tokens - window:
        highest = tokens - window
        lowest = per_head * 2 - highest
    if not tokens >= highest >= lowest >= window:
        return [per_head] * layers
    return [highest - layer * (highest - lowest) / (layers - 1) for layer in range(layers)]


@settings(deadline=None, max_examples=300)
@given(
    layers=st.integers(2, 40),
    tokens=st.integers(1, 5000),
    percent=st.integers(1, 100),
    window=st.integers(1, 64),
    more=st.integers(0, 40),
)
def test_pyramidkv_keeps_its_total_and_its_floors(
    layers: int, tokens: int, percent: int, window: int, more: int
) -> None:
    budget = resolved(f"{percent}%", tokens, layers, protected=window + more)
    config = make_config("pyramidkv", positions=window, recent=window, sinks=more)
    counts = make_policy(config, TRAITS).layer_counts(budget, layers)
    assert counts is not None and len(counts) == layers
    assert sum(counts) == layers * budget.per_head
    assert all(budget.protected <= count <= tokens for count in counts)
    assert sorted(counts, reverse=True) == list(counts)
    shares = published_pyramid(budget.per_head, tokens, window, layers)
    if min(shares) >= budget.protected:  # no floor to make up for: the published shares, rounded
        assert all(abs(count - share) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))
    lengths = torch.full((layers, 2), tokens)
    quota = quotas(budget, "head", lengths, range(layers), layer_counts=counts)
    assert (lengths.flatten() - quota.evict).tolist() == [count for count in counts for _ in range(2)]


def test_the_pyramid_by_hand() -> None:
    assert [float(share) for share in pyramid(200, 1000, 8, 3)] == [390, 200, 10]
    assert [float(share) for share in pyramid(700, 1000, 8, 2)] == [992, 408]  # the first layer has no more to give
    assert [float(share) for share in pyramid(100, 1000, 8, 3)] == [
        100,
        100,
        100,
    ]  # not 5 in the last
    config = make_config("pyramidkv", positions=8, recent=32)
    policy = make_policy(config, TRAITS)
    assert policy.layer_counts(resolved("0.2", 1000, 4, protected=0), 4) == [390, 263, 137, 10]
    assert policy.layer_counts(resolved("0.2", 1000, 1, protected=36), 1) == [200]
    assert policy.layer_counts(resolved("0.2", 1000, 0, protected=36), 0) is None


@settings(deadline=None, max_examples=200)
@given(
    heads=st.integers(1, 4),
    tokens=st.integers(4, 60),
    percent=st.integers(1, 100),
    sinks=st.integers(0, 3),
    recent=st.integers(1, 12),
    steepness=st.sampled_from([0.0, 3.0]),  # with 3 one head would take all if it could
    seed=st.integers(0, 99),
)
def test_adakv_keeps_the_best_of_the_layer_after_the_best_of_every_head(
    heads: int, tokens: int, percent: int, sinks: int, recent: int, steepness: float, seed: int
) -> None:
    traits = replace(TRAITS, kv_heads=heads, query_heads=heads)
    budget = resolved(f"{percent}%", tokens, len(traits.compactable_layers), sinks + recent, heads)
    torch.manual_seed(seed)
    scores = torch.rand(traits.layers, heads, tokens) * (1 + steepness * torch.arange(heads)[:, None])
    eligible = torch.zeros(scores.shape, dtype=torch.bool)
    eligible[[0, 2], :, sinks : max(sinks, tokens - recent)] = True
    quota = quotas(budget, "layer", torch.full((traits.layers, heads), tokens), traits.compactable_layers)
    policy = make_policy(make_config("adakv", sinks=sinks, recent=recent, positions=1), traits)
    evict = policy.select(scores, eligible, quota, None, None).evict  # type: ignore[arg-type]
    assert not bool(evict[1].any())
    safe = budget.per_head // 5
    for layer in traits.compactable_layers:
        kept, rest = set(), []
        for head in range(heads):
            may_go = eligible[layer, head].nonzero().flatten().tolist()
            best = sorted(may_go, key=lambda row: -float(scores[layer, head, row]))  # noqa: B023 (used at once)
            secured = max(0, safe - (tokens - len(may_go)))
            kept |= {(head, row) for row in range(tokens) if row not in may_go or row in best[:secured]}
            rest += [(float(scores[layer, head, row]), head, row) for row in best[secured:]]
        room = heads * budget.per_head - len(kept)
        kept |= {(head, row) for _, head, row in sorted(rest, reverse=True)[:room]}
        assert kept == {(head, row) for head in range(heads) for row in range(tokens) if not evict[layer, head, row]}
        assert min((~evict[layer]).sum(-1).tolist()) >= safe


@pytest.mark.parametrize("evicted", [3, 12, 20])
def test_criticalkv_gives_half_to_attention_alone_and_half_to_attention_times_value(
    view: SequenceView, evicted: int
) -> None:
    statistics = make_statistics(view)
    scores, lengths = scores_of("criticalkv", view, statistics), torch.from_numpy(view.lengths).long()
    rows = torch.arange(scores.shape[-1])
    eligible = (rows >= 2) & (rows < lengths[..., None] - WINDOW)
    eligible[1] = False
    unit = torch.tensor([[0, 1], [-1, -1], [2, 3]])
    most = eligible.sum(-1)[[0, 2]].flatten()
    quota = Quota(unit, most.clamp(max=evicted), lengths * (unit >= 0))
    policy = make_policy(make_config("criticalkv"), TRAITS)
    evict = policy.select(scores, eligible, quota, statistics, view).evict
    differs = 0
    for layer, head in COMPACTABLE_HEADS:
        observed, n = pooled_attention(view, statistics, layer, head), int(lengths[layer, head])
        may_go = eligible[layer, head].nonzero().flatten().tolist()
        keep = n - min(evicted, len(may_go))
        first = max(0, keep // 2 - (n - len(may_go)))
        by_attention = sorted(may_go, key=lambda row: -observed[row])  # noqa: B023 (used at once)
        by_both = sorted(by_attention[first:], key=lambda row: -float(scores[layer, head, row]))  # noqa: B023
        gone = by_both[keep - (n - len(may_go)) - first :]
        assert evict[layer, head].nonzero().flatten().tolist() == sorted(gone)
        lowest = sorted(may_go, key=lambda row: float(scores[layer, head, row]))[: len(gone)]  # noqa: B023
        differs += set(lowest) != set(gone)
    assert differs or evicted != 12  # where the first half decides


def test_criticalkv_secures_half_of_a_whole_unit(view: SequenceView) -> None:
    """In scope global half of all that stays is chosen by attention, wherever it is."""
    statistics = make_statistics(view)
    scores, lengths = scores_of("criticalkv", view, statistics, scope="global"), torch.from_numpy(view.lengths).long()
    rows = torch.arange(scores.shape[-1])
    eligible = (rows < lengths[..., None] - WINDOW) & torch.tensor([True, False, True])[:, None, None]
    unit = torch.tensor([[0, 0], [-1, -1], [0, 0]])
    counted = lengths * (unit >= 0)
    quota = Quota(unit, torch.tensor([50]), counted)
    evict = (
        make_policy(make_config("criticalkv", scope="global"), TRAITS)
        .select(scores, eligible, quota, statistics, view)
        .evict
    )
    observed = {
        (layer, head, row): weight
        for layer, head in COMPACTABLE_HEADS
        for row, weight in enumerate(pooled_attention(view, statistics, layer, head))
    }
    first = (int(counted.sum()) - 50) // 2 - WINDOW * len(COMPACTABLE_HEADS)
    assert first > 5 and int(evict.sum()) == 50
    best = sorted(observed, key=lambda entry: -observed[entry])
    assert not any(bool(evict[entry]) for entry in best[:first])
    rest = sorted(best[first:], key=lambda entry: float(scores[entry]))
    assert all(bool(evict[entry]) for entry in rest[:50])
