"""The scoring positions run again over the pool, against one transformers forward for each of them."""

import pytest
import torch
from torch import Tensor

from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.torch_host import Replay
from tests.runtime.own_path import Observation, OwnPath
from tests.runtime.random_models import ARCHITECTURES, COMPACTABLE, engine_of, random_tokens
from tests.runtime.trail import Trail, follow

M, LENGTH = 5, 60


def close(ours: Tensor, truth: Tensor) -> bool:
    return float((ours - truth).abs().max()) < 1e-5 * float(truth.abs().max())


def assert_same(replay: Replay, truth: list[Observation]) -> None:
    """One observation of one token for every position of the replay."""
    layers, count, heads, width = replay.q.shape
    for index, seen in enumerate(truth):
        for layer in range(layers):
            assert close(replay.q[layer, index], seen.q[layer][:, 0])
            assert close(replay.context[layer, index], seen.context[layer].view(heads, width))
        assert close(replay.residual[index], seen.residual[0])
        assert close(replay.logits[index], seen.logits[0])
    assert len(truth) == count


def encoded(name: str, length: int = LENGTH) -> tuple[Engine, Trail]:
    engine = engine_of(name, policy="full")
    (trail,) = follow(engine, [random_tokens(1, length)], [[]])
    return engine, trail


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_eviction_it_is_the_forward_that_ran(name: str) -> None:
    engine, trail = encoded(name)
    replay, path = engine.host.replay(trail.sequence, M), OwnPath(name, trail.tokens)
    assert replay.positions.tolist() == list(range(LENGTH - M, LENGTH))
    for layer, q in path.whole.q.items():
        assert close(replay.q[layer], q[:, -M:].transpose(0, 1))
        assert close(replay.context[layer].flatten(1), path.whole.context[layer][-M:])
    assert close(replay.residual, path.whole.residual[-M:])
    assert close(replay.logits, path.whole.logits[-M:])


@torch.no_grad()
@pytest.mark.parametrize("name", COMPACTABLE)
def test_an_eviction_is_seen_by_each_positions_own_path_alone(name: str) -> None:
    engine, trail = encoded(name)
    layers = list(engine.host.traits.compactable_layers)
    evicted = torch.zeros(engine.host.traits.layers, engine.host.traits.kv_heads, LENGTH, dtype=torch.bool)
    chosen = torch.rand(len(layers), evicted.shape[1], LENGTH - M, generator=torch.Generator().manual_seed(0)) < 0.5
    evicted[layers, :, : LENGTH - M] = chosen
    path = OwnPath(name, trail.tokens)
    truth = [path.at(position, evicted) for position in range(LENGTH - M, LENGTH)]
    longest = int(engine.pool.lengths(trail.sequence).max())
    replay = engine.host.replay(trail.sequence, M, evicted[:, :, :longest])
    assert_same(replay, truth)
    assert not close(replay.logits, path.whole.logits[-M:]), "the eviction is large enough to be seen"


@torch.no_grad()
@pytest.mark.parametrize("name", COMPACTABLE)
def test_after_a_compaction_it_runs_over_what_is_left(name: str) -> None:
    """Ragged heads; the positions saw the evicted entries when they first ran and must not see them now."""
    engine = engine_of(name, budget="0.4", regime="prefill")
    (trail,) = follow(engine, [random_tokens(1, LENGTH)], [random_tokens(2, 2)])
    hidden = trail.hidden_from()
    path = OwnPath(name, trail.tokens, hidden)
    gone = hidden <= len(trail.tokens)
    truth = [path.at(position, gone) for position in range(len(trail.tokens) - M, len(trail.tokens))]
    assert_same(engine.host.replay(trail.sequence, M), truth)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_pool_is_only_read(name: str) -> None:
    engine, trail = encoded(name)
    pool = engine.pool
    before = [tensor.clone() for tensor in (pool.keys, pool.values, pool.row_positions)]
    lengths, pages = pool.lengths(trail.sequence), pool.page_table(trail.sequence)
    engine.host.replay(trail.sequence, M)
    engine.statistics.requires = frozenset({"readout"})
    engine.statistics.collect(trail.sequence, M, engine.trace)
    for tensor, copy in zip((pool.keys, pool.values, pool.row_positions), before, strict=True):
        assert torch.equal(tensor.view(torch.int32), copy.view(torch.int32)), "NaN of free rows included"
    assert (pool.lengths(trail.sequence) == lengths).all() and (pool.page_table(trail.sequence) == pages).all()
    pool.check_integrity()


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral_sliding", "gemma3"])
def test_many_positions_far_beyond_the_window(name: str) -> None:
    """As many positions as the configuration allows, after the rows behind the window were freed."""
    engine = engine_of(
        name, policy="full", regime="deferred", positions=80, recent=100, defer=20, generation_budget="100t"
    )
    (trail,) = follow(engine, [random_tokens(1, 120)], [[5, 6, 7]])
    path = OwnPath(name, trail.tokens)
    replay = engine.host.replay(trail.sequence, 100)
    assert close(replay.logits, path.whole.logits[-100:])
    assert close(replay.residual, path.whole.residual[-100:])
