"""A ragged pool that compaction has cut to pieces, statistics to go with it, and plain float64 loops over both."""

import math

import pytest
import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.statistics import ForwardStatistics, QueryMoments
from bpkv_trt.core.traits import ModelTraits
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


@pytest.fixture
def window_only() -> SequenceView:
    """A sequence of no more rows than the window has."""
    torch.manual_seed(0)
    pool = PagedKvPool(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, pages=20, page_size=4, poison=True)
    sequence = pool.admit()
    pool.extend(sequence, WINDOW)
    for layer in range(LAYERS):
        pool.write(sequence, layer, *torch.randn(2, HEADS, WINDOW, WIDTH))
    return pool.view(sequence)


class Projections:
    """W_O of every layer."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights  # [L, d, Hq D]

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        return self.weights[layer], None


def make_statistics(view: SequenceView) -> ForwardStatistics:
    query_heads = HEADS * GROUP
    exponents = 2 * torch.arange(WIDTH // 2) / WIDTH
    draws = torch.randn(LAYERS, query_heads, 3 * WIDTH, WIDTH)
    weights = torch.randn(LAYERS, TRAITS.width, query_heads * WIDTH)
    return ForwardStatistics(
        q=torch.randn(LAYERS, WINDOW, query_heads, WIDTH) * 3,
        context=torch.randn(LAYERS, WINDOW, query_heads, WIDTH),
        residual=torch.randn(WINDOW, TRAITS.width),
        topk_ids=torch.zeros(WINDOW, 5, dtype=torch.int64),
        topk_p=torch.full((WINDOW, 5), 0.2),
        covered_mass=torch.ones(WINDOW),
        positions=torch.arange(TOKENS - WINDOW, TOKENS),
        received_attention=torch.rand(LAYERS, HEADS, int(view.lengths.max())),
        projections=Projections(weights),
        query_moments=QueryMoments(
            mean=draws.mean(2),
            covariance=draws.mT @ draws / draws.shape[2],
            inverse_frequencies=tuple(10.0 ** -(layer + exponents) for layer in range(LAYERS)),
        ),
    )


def make_config(name: str, **options: object) -> BpkvConfig:
    return settled(BpkvConfig(policy=name, **{"positions": WINDOW, "recent": 8, **options}))


def scores_of(
    name: str, view: SequenceView, statistics: ForwardStatistics, traits: ModelTraits = TRAITS, **options: int
) -> Tensor:
    scores = make_policy(make_config(name, **options), traits).score(statistics, view)
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


def pooled_attention(view: SequenceView, statistics: ForwardStatistics, layer: int, head: int) -> list[float]:
    """SnapKV's scores of the rows before the window: mean over positions and group, then over 5 neighbours."""
    queries = range(head * GROUP, (head + 1) * GROUP)
    observed = torch.stack([window_attention(view, statistics, layer, head, query) for query in queries])
    prefix = observed.mean((0, 1))[:-WINDOW].tolist()
    return [sum(prefix[max(0, row - 2) : row + 3]) / 5 for row in range(len(prefix))]  # zeros past the ends count


def true_context(view: SequenceView, statistics: ForwardStatistics) -> Tensor:
    """[L, M, Hq, D]: the attention outputs that belong to the queries and the rows held."""
    context = statistics.context.clone()
    for layer, head in COMPACTABLE_HEADS:
        values = view.values(layer, head).double()
        for query in range(head * GROUP, (head + 1) * GROUP):
            context[layer, :, query] = (window_attention(view, statistics, layer, head, query) @ values).float()
    return context
