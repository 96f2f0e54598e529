"""What is gathered while tokens pass, against transformers' eager attention and its own query projections."""

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.errors import ConfigError
from tests.runtime.own_path import OwnPath
from tests.runtime.random_models import COMPACTABLE, SMALL, engine_of, random_tokens, wrapped
from tests.runtime.trail import follow

LENGTH, STEPS = 50, 20
HALVES = tuple(name for name in COMPACTABLE if not name.startswith("cohere"))  # Cohere turns neighbours, not halves


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_received_attention_is_the_column_sum_of_all_queries_that_saw_the_entry(name: str, policy: str) -> None:
    """Over prefill and decoding; with h2o also over compactions, with which the sums move."""
    engine = engine_of(name, policy=policy, budget="0.5")
    if policy == "full":
        engine.statistics.requires = frozenset({"received_attention"})
    (trail,) = follow(engine, [random_tokens(1, LENGTH)], [random_tokens(2, STEPS)])
    assert (trail.events[-1].entries_after < trail.events[-1].entries_before) == (policy == "h2o")
    weights, traits = OwnPath(name, trail.tokens, trail.hidden_from()).whole.weights, engine.host.traits
    received = engine.statistics.received[trail.sequence].result(RunningAttention())
    assert received.dtype == torch.float32 and received[sorted(traits.sliding_layers)].abs().sum() == 0
    view = engine.pool.view(trail.sequence)
    for layer in traits.compactable_layers:
        grouped = weights[layer].detach().double().unflatten(0, (traits.kv_heads, traits.group))
        for head, columns in enumerate(grouped.mean(1).sum(1)):  # [N]
            positions = view.positions(layer, head).long()
            ours = received[layer, head, : len(positions)].double()
            assert torch.allclose(ours, columns[positions], rtol=1e-4, atol=1e-5)
            assert received[layer, head, len(positions) :].abs().sum() == 0


@pytest.mark.parametrize("name", HALVES)
def test_query_moments_are_those_of_the_projected_queries(name: str) -> None:
    """Prompt and answer together, without the sinks; an eviction changes nothing of it."""
    engine = engine_of(name, policy="expected_attention", budget="0.5")
    (trail,) = follow(engine, [random_tokens(1, LENGTH)], [random_tokens(2, STEPS)])
    moments = engine.statistics.moments[trail.sequence].result()
    own = OwnPath(name, trail.tokens, trail.hidden_from()).whole
    for layer in range(engine.host.traits.layers):
        queries = own.unrotated[layer][:, SMALL["sinks"] :].double()  # [Hq, n, D]
        mean = queries.mean(1)
        assert torch.allclose(moments.mean[layer].double(), mean, rtol=1e-4, atol=1e-4 * float(queries.abs().max()))
        centred = queries - mean[:, None]
        covariance = centred.mT @ centred / queries.shape[1]
        tolerance = 1e-4 * float(covariance.abs().max())
        assert torch.allclose(moments.covariance[layer].double(), covariance, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("requirement", ["query_moments", "received_attention"])
def test_what_is_gathered_in_pieces_is_what_is_gathered_at_once(name: str, requirement: str) -> None:
    tokens = random_tokens(3, LENGTH)

    def gathered(pieces: list[list[int]]) -> list[Tensor]:
        engine = engine_of(name, policy="full")
        engine.statistics.requires = frozenset({requirement})
        sequence = engine.open()
        for piece in pieces:
            engine.encode([(sequence, piece)])
        if requirement == "received_attention":
            return [engine.statistics.received[sequence].result(RunningAttention())]
        moments = engine.statistics.moments[sequence].result()
        return [moments.mean, moments.covariance, *moments.inverse_frequencies]

    at_once = gathered([tokens])
    for pieces in ([tokens[:1], tokens[1:2], tokens[2:7], tokens[7:]], [[token] for token in tokens]):
        for ours, truth in zip(gathered(pieces), at_once, strict=True):
            assert torch.allclose(ours, truth, rtol=1e-4, atol=1e-5 * float(truth.abs().max()))


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inverse_frequencies_are_those_that_turned_the_queries(name: str, dtype: torch.dtype) -> None:
    """Read off the fp32 model's queries: the angle between them before and after RoPE, at the far end of the text."""
    tokens = random_tokens(1, LENGTH)
    own = OwnPath(name, tokens).whole
    engine = engine_of(name, policy="full", dtype=dtype)
    engine.statistics.requires = frozenset({"query_moments"})
    sequence = engine.open()
    engine.encode([(sequence, tokens)])
    frequencies = engine.statistics.moments[sequence].result().inverse_frequencies
    half = wrapped(name).traits.head_dim // 2
    for layer, rotated in own.q.items():
        before = torch.view_as_complex(torch.stack(own.unrotated[layer].double().split(half, -1), -1))  # [Hq, N, D / 2]
        after = torch.view_as_complex(torch.stack(rotated.double().split(half, -1), -1))
        assert frequencies[layer].dtype == torch.float32
        for position in (1, LENGTH - 1):
            turn = torch.exp(1j * position * frequencies[layer].double())
            assert torch.allclose(before[:, position] * turn, after[:, position], atol=1e-4 * float(before.abs().max()))


def test_a_rope_that_turns_neighbours_has_no_such_moments() -> None:
    with pytest.raises(ConfigError, match="expected_attention needs query_moments.*cohere"):
        engine_of("cohere", policy="expected_attention")
