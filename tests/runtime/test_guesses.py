"""A draft that has not come true counts as a guess, with a tenth of the weight, in every readout."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bpkv_trt.core.evidence import score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.runtime.engine import Engine
from tests.runtime.drafts import AHEAD, MORE, OPTIONS, PROMPT, greedy
from tests.runtime.random_models import COMPACTABLE, engine_of, wrapped

GUESSING = {**OPTIONS, "regime": "deferred", "defer": 5}


@contextmanager
def guessing(engine: Engine, answer: list[int]) -> Iterator[tuple[int, tuple[float, ...]]]:
    """A draft at the end of the prompt, then an answer, then the look ahead: the sequence, and the weights given."""
    sequence = engine.open()
    engine.encode([(sequence, PROMPT)])
    engine.statistics.draft_answer(sequence, AHEAD, engine.trace)
    for token in answer:
        engine.decode([(sequence, [token])])
    with engine.statistics.look_ahead(sequence, AHEAD, engine.trace) as weights:
        yield sequence, tuple(weights)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.usefixtures("endless")
def test_a_draft_weighs_a_tenth_where_it_has_not_come_true(name: str) -> None:
    for answer, guesses in ((MORE[:5], AHEAD), (greedy(name, PROMPT, 5), 0)):
        with guessing(engine_of(name, **GUESSING), answer) as (_, weights):
            assert weights == (1.0,) * AHEAD + (0.1,) * guesses


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.usefixtures("endless")
def test_exact_scores_are_the_weighted_mean_of_those_of_each_position(name: str) -> None:
    """1/2 (dz . xi)^2 for dz . xi = a / (1 - a) (c - v) . row, position by position in float64; weights 1 and 0.1."""
    engine, traits = engine_of(name, **GUESSING, readout="exact", probes=2), wrapped(name).traits
    own, length = engine.compactor.config.scoring_positions, len(PROMPT) + 5
    with guessing(engine, MORE[:5]) as (sequence, weights):
        statistics = engine.statistics.collect(sequence, own + len(weights), engine.trace, weights)
        view = engine.pool.view(sequence)
        source = EvidenceSource(statistics, view, traits)
        scores = score_entries(source, statistics.readout.divergence)
        assert statistics.drafted == len(weights) == 2 * AHEAD
        for layer, whole in source.layers():
            for head in range(traits.kv_heads):
                held = source.attention(layer, head)
                a, c, v = held.a.double(), held.c.double(), held.v.double()  # [G, M, T], [M, G, D], [T, D]
                total = torch.zeros(a.shape[-1], dtype=torch.float64)
                for m, weight in enumerate([1.0] * (own + AHEAD) + [0.1] * AHEAD):
                    moved = (c[m, :, None] - v) * (a[:, m] / (1 - a[:, m]))[..., None]  # [G, T, D]
                    read = torch.einsum("gtd,rgd->rt", moved, whole.rows[m, :, head].double())
                    total += weight * read.square().mean(0) / 2
                truth = total / (own + AHEAD + 0.1 * AHEAD)
                told = (a.amax((0, 1)) < 0.9) & (truth > truth.max() * 1e-9)
                told[length:] = False
                assert told.sum() > length // 2
                torch.testing.assert_close(scores[layer, head][told].double(), truth[told], rtol=2e-3, atol=0)


@pytest.mark.usefixtures("endless")
def test_the_direct_readout_has_the_same_weights() -> None:
    engine = engine_of("llama", **GUESSING, readout="direct")
    with guessing(engine, MORE[:5]) as (sequence, weights):
        statistics = engine.statistics.collect(sequence, 10 + len(weights), engine.trace, weights)
    assert statistics.readout is not None
    shift = torch.randn(statistics.topk_p.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    p = statistics.topk_p.double()
    kl = torch.logsumexp(p.log() + shift, -1) - (p * shift).sum(-1)
    mean = (kl[: 10 + AHEAD].sum() + 0.1 * kl[10 + AHEAD :].sum()) / (10 + AHEAD + 0.1 * AHEAD)
    assert float(statistics.readout.divergence.of(shift)) == pytest.approx(float(mean), rel=1e-4)
