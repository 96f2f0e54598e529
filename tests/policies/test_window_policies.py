"""Peers that score from the last positions' queries, against a plain loop in float64 over a ragged pool."""

from dataclasses import replace

import pytest
import torch

from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.criticalkv import projected_norms
from bpkv_trt.pool import PagedKvPool, SequenceView
from tests.policies.conftest import (
    COMPACTABLE_HEADS,
    GROUP,
    HEADS,
    LAYERS,
    TOKENS,
    TRAITS,
    WIDTH,
    WINDOW,
    Projections,
    make_statistics,
    pooled_attention,
    scores_of,
    true_context,
    window_attention,
)


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv", "deferkv"])
def test_the_mean_window_attention_of_the_group_is_pooled(view: SequenceView, name: str) -> None:
    statistics = make_statistics(view)
    scores = scores_of(name, view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        n = int(view.lengths[layer, head])
        truth = pooled_attention(view, statistics, layer, head)
        assert scores[layer, head, : n - WINDOW].tolist() == pytest.approx(truth, rel=1e-5)
        assert bool((scores[layer, head, n - WINDOW : n] > scores[layer, head, : n - WINDOW].max()).all())


def test_snapkv_uses_the_softcap_and_sink_logits_of_the_model(view: SequenceView) -> None:
    plain = make_statistics(view)
    capped = scores_of("snapkv", view, plain, replace(TRAITS, attention_softcap=2.0))
    assert not torch.allclose(capped, scores_of("snapkv", view, plain))
    sunk = replace(plain, sink_logits=torch.full((LAYERS, HEADS * GROUP), 50.0))  # all attention goes to the sink
    scores = scores_of("snapkv", view, sunk, replace(TRAITS, sink_logits=True))
    for layer, head in COMPACTABLE_HEADS:
        assert bool((scores[layer, head, : view.lengths[layer, head] - WINDOW] < 1e-9).all())


def test_snapkv_of_nothing_but_a_window(window_only: SequenceView) -> None:
    scores = scores_of("snapkv", window_only, make_statistics(window_only))
    assert bool((scores[list(TRAITS.compactable_layers)] == 1).all())


def test_tova_is_the_last_querys_attention_by_token_mean_over_the_layer(view: SequenceView) -> None:
    """Heads hold different tokens here: one without a token attends 0 to it."""
    statistics = make_statistics(view)
    scores = scores_of("tova", view, statistics)
    for layer in TRAITS.compactable_layers:
        received = [0.0] * TOKENS
        for query in range(HEADS * GROUP):
            head = query // GROUP
            last = window_attention(view, statistics, layer, head, query)[-1].tolist()
            for token, weight in zip(view.positions(layer, head).tolist(), last, strict=True):
                received[token] += weight / (HEADS * GROUP)
        for head in range(HEADS):
            tokens = view.positions(layer, head).tolist()
            own = scores[layer, head, : len(tokens)].tolist()
            assert own[:-1] == pytest.approx([received[token] for token in tokens[:-1]], rel=1e-5)
            assert own[-1] > max(received)


def shift_without(view: SequenceView, statistics: ForwardStatistics, layer: int, head: int, row: int) -> float:
    """Sum over positions, mean over the group, of |o' - o|^2 with o' the attention over all rows but one."""
    values = view.values(layer, head).double()
    others = [other for other in range(values.shape[0]) if other != row]
    total = 0.0
    for query in range(head * GROUP, (head + 1) * GROUP):
        weights = window_attention(view, statistics, layer, head, query)
        for position in weights:
            without = position[others] @ values[others] / position[others].sum()
            total += float((without - position @ values).square().sum())
    return total / GROUP


def test_dropkv_is_the_squared_shift_of_the_output_without_the_entry(view: SequenceView) -> None:
    statistics = make_statistics(view)
    statistics = replace(statistics, context=true_context(view, statistics))
    scores = scores_of("dropkv", view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        n = int(view.lengths[layer, head])
        truth = [shift_without(view, statistics, layer, head, row) for row in range(n)]
        assert scores[layer, head, :n].tolist() == pytest.approx(truth, rel=1e-3)


def shifted_view(view: SequenceView, offset: float) -> SequenceView:
    """The same pool with `offset` added to every value."""
    store = view.store
    assert isinstance(store, PagedKvPool)
    store.values += offset
    return view


def test_dropkv_keeps_its_digits_where_values_share_a_large_part(view: SequenceView) -> None:
    view = shifted_view(view, 1000.0)
    statistics = make_statistics(view)
    statistics = replace(statistics, context=true_context(view, statistics))
    scores = scores_of("dropkv", view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        n, values = int(view.lengths[layer, head]), view.values(layer, head).double()
        truth = torch.zeros(n, dtype=torch.float64)
        for query in range(head * GROUP, (head + 1) * GROUP):
            a = window_attention(view, statistics, layer, head, query)
            for m in range(WINDOW):
                away = (values - statistics.context[layer, m, query].double()).square().sum(1)
                truth += (a[m] / (1 - a[m])) ** 2 * away / GROUP
        assert torch.allclose(scores[layer, head, :n].double(), truth, rtol=1e-4)


def test_dropkv_does_not_clamp_an_entry_that_holds_nearly_all_attention(view: SequenceView) -> None:
    statistics = make_statistics(view)
    layer, head = COMPACTABLE_HEADS[0]
    key = view.keys(layer, head)[9]
    for scale in range(1, 200):
        statistics.q[layer, 0, head * GROUP] = scale * key
        weights = window_attention(view, statistics, layer, head, head * GROUP)[0]
        if float(weights.max()) > 0.9995:
            break
    row = int(weights.argmax())
    assert 0.9995 < float(weights[row]) < 0.99999
    statistics = replace(statistics, context=true_context(view, statistics))
    truth = shift_without(view, statistics, layer, head, row)
    assert scores_of("dropkv", view, statistics)[layer, head, row].item() == pytest.approx(truth, rel=1e-2)


def test_dropkv_keeps_what_is_all_that_a_head_attends_to(view: SequenceView) -> None:
    statistics = make_statistics(view)
    layer, head = COMPACTABLE_HEADS[0]
    n = int(view.lengths[layer, head])
    key = view.keys(layer, head)[n // 2]
    statistics.q[layer, 0, head * GROUP] = 1e4 * key
    weights = window_attention(view, statistics, layer, head, head * GROUP)[0]
    sole = int(weights.argmax())
    assert float(weights[sole]) == 1.0
    scores = scores_of("dropkv", view, statistics)
    assert bool(torch.isfinite(scores).all())
    assert scores[layer, head, sole] == torch.finfo(torch.float32).max
    assert bool((scores[layer, head, :n] < torch.finfo(torch.float32).max).sum() == n - 1)


def test_criticalkv_weighs_pooled_attention_by_the_projected_value(view: SequenceView) -> None:
    statistics = make_statistics(view)
    assert isinstance(statistics.projections, Projections)
    scores = scores_of("criticalkv", view, statistics)
    for layer, head in COMPACTABLE_HEADS:
        observed = pooled_attention(view, statistics, layer, head)
        weight = statistics.projections.weights[layer].double()
        for row, value in enumerate(view.values(layer, head).double()[:-WINDOW]):
            norms = [
                float((weight[:, query * WIDTH : (query + 1) * WIDTH] @ value).abs().sum())
                for query in range(head * GROUP, (head + 1) * GROUP)
            ]
            truth = (observed[row] + 1e-4) * sum(norms) / GROUP
            assert scores[layer, head, row].item() == pytest.approx(truth, rel=1e-4)


def test_projected_norms_do_not_depend_on_the_tiles() -> None:
    """8,192 outputs make tiles of 64 rows."""
    torch.manual_seed(0)
    values, projection = torch.randn(150, 4), torch.randn(8192, 3, 4)
    truth = torch.einsum("nd,ogd->ngo", values.double(), projection.double()).abs().sum(-1).mean(1)
    assert torch.allclose(projected_norms(values, projection).double(), truth, rtol=1e-5)
