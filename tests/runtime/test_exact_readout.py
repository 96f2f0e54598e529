"""The exact readout is the true Jacobian along each position's own path: autograd and differences of other code."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from bpkv_trt.core.divergence import FisherDivergence
from bpkv_trt.core.readout import fisher_probes
from bpkv_trt.core.statistics import ForwardStatistics, Readout
from bpkv_trt.runtime.engine import Engine
from tests.runtime.own_path import OwnPath
from tests.runtime.random_models import COMPACTABLE, engine_of, random_tokens
from tests.runtime.trail import Trail, follow

M, LENGTH, PROBES = 4, 50, 3
OPTIONS = {"regime": "prefill", "readout": "exact", "probes": PROBES, "positions": M}


def encoded(name: str, **options: object) -> tuple[Engine, Trail]:
    engine = engine_of(name, **{**OPTIONS, "budget": "1.0", **options})
    (trail,) = follow(engine, [random_tokens(1, LENGTH)], [[]])
    return engine, trail


def collected(engine: Engine, trail: Trail) -> tuple[ForwardStatistics, Readout]:
    statistics = engine.statistics.collect(trail.sequence, M, engine.trace)
    assert statistics.readout is not None
    return statistics, statistics.readout


def probes_of(engine: Engine, statistics: ForwardStatistics) -> Tensor:
    """[M, R, K], as a generator that starts at the configured seed draws them."""
    generator = torch.Generator().manual_seed(engine.compactor.config.seed)
    return fisher_probes(statistics.topk_p, PROBES, generator)


@pytest.mark.parametrize("name", COMPACTABLE)
def test_rows_are_the_gradients_of_the_probed_logits(name: str) -> None:
    """Every row against autograd through transformers' own layers, each position run by itself over a frozen cache."""
    engine, trail = encoded(name)
    statistics, readout = collected(engine, trail)
    xi, path, traits = probes_of(engine, statistics), OwnPath(name, trail.tokens), engine.host.traits
    assert sorted(layer for layer, _ in readout) == list(traits.compactable_layers)
    for layer, rows in readout:
        assert rows.shape == (M, PROBES, traits.query_heads, traits.head_dim) and rows.dtype == torch.float32
        for m, position in enumerate(statistics.positions.tolist()):
            shift = torch.zeros(traits.query_heads * traits.head_dim, requires_grad=True)
            logits = path.at(position, shifts={layer: shift}).logits[0]
            for probe in range(PROBES):
                probed = logits[statistics.topk_ids[m]] @ xi[m, probe]
                (truth,) = torch.autograd.grad(probed, shift, retain_graph=True)
                assert float((rows[m, probe].flatten() - truth).abs().max()) < 2e-5 * float(truth.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "cohere"])
def test_rows_predict_finite_differences(name: str) -> None:
    """A small shift of all layers' contexts at once moves the probed logits by the sum over layers of row . shift."""
    engine, trail = encoded(name)
    statistics, readout = collected(engine, trail)
    xi, path = probes_of(engine, statistics), OwnPath(name, trail.tokens)
    generator, layers = torch.Generator().manual_seed(7), dict(iter(readout))
    for m, position in enumerate(statistics.positions.tolist()):
        shifts = {
            layer: torch.randn(rows[0, 0].numel(), generator=generator) * statistics.context[layer, m].std()
            for layer, rows in layers.items()
        }
        read = sum(rows[m].flatten(1) @ shifts[layer] for layer, rows in layers.items())

        def probed(scale: float, m: int = m, position: int = position, shifts: dict[int, Tensor] = shifts) -> Tensor:
            moved = path.at(position, shifts={layer: scale * shift for layer, shift in shifts.items()})
            return xi[m].double() @ moved.logits[0, statistics.topk_ids[m]].double()

        step = 2e-3  # the error of a central difference is of second order; below, fp32 rounding takes over
        differences = (probed(step) - probed(-step)) / (2 * step)
        assert float((differences - read).norm() / differences.norm()) < 5e-3


@pytest.fixture
def silence_mlp() -> Iterator[Callable[[nn.Linear], None]]:
    """Zeroes a down projection until the test is over."""
    saved: list[tuple[nn.Parameter, Tensor]] = []

    def silence(projection: nn.Linear) -> None:
        saved.append((projection.weight, projection.weight.clone()))
        projection.weight.zero_()

    yield silence
    for weight, original in saved:
        weight.copy_(original)


@pytest.mark.parametrize("name", [name for name in COMPACTABLE if name != "qwen2_sliding"])
def test_of_the_last_layer_without_mlp_the_direct_readout_is_exact_too(
    name: str, silence_mlp: Callable[[nn.Linear], None]
) -> None:
    """Nothing but W_O, the norms and the head lies between the last attention and the logits then."""
    engine, _ = encoded(name)
    silence_mlp(engine.host.model.model.layers[-1].mlp.down_proj)
    (trail,) = follow(engine, [random_tokens(2, LENGTH)], [[]])
    statistics, exact = collected(engine, trail)
    xi = probes_of(engine, statistics)
    engine.statistics.config = engine.compactor.config.replace(readout="direct")
    _, direct = collected(engine, trail)
    layer = engine.host.traits.layers - 1
    probed = torch.einsum("mrk,mkhd->mrhd", xi, dict(iter(direct))[layer])
    rows = dict(iter(exact))[layer]
    assert float((probed - rows).abs().max()) < 2e-5 * float(rows.abs().max())


def test_probes_depend_on_the_seed_and_on_no_other_request() -> None:
    engine, trail = encoded("llama")
    alone = dict(iter(collected(engine, trail)[1]))
    (other,) = follow(engine, [random_tokens(5, 33)], [[]])
    collected(engine, other)
    torch.manual_seed(99)
    again = dict(iter(collected(engine, trail)[1]))
    assert all(torch.equal(again[layer], rows) for layer, rows in alone.items())
    reseeded = dict(iter(collected(*encoded("llama", seed=1))[1]))
    assert not any(torch.allclose(reseeded[layer], rows) for layer, rows in alone.items())


def test_the_divergence_is_the_fisher_form_of_kl() -> None:
    """With many probes, 1/2 mean (dz . xi)^2 comes to the KL of a small shift of the top-K logits."""
    engine, trail = encoded("llama", probes=1)
    statistics, readout = collected(engine, trail)
    assert isinstance(readout.divergence, FisherDivergence)
    generator = torch.Generator().manual_seed(3)
    xi = fisher_probes(statistics.topk_p, 20_000, generator).double()
    dz = torch.randn(statistics.topk_p.shape, generator=generator).double() * 1e-3
    p = statistics.topk_p.double()
    kl = ((p * dz.exp()).sum(-1).log() - (p * dz).sum(-1)).mean()
    probed = readout.divergence.of(torch.einsum("mrk,mk->mr", xi, dz).float())
    assert abs(float(probed / kl) - 1) < 0.05


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_no_parameter_gathers_a_gradient_and_no_graph_outlives_the_readout(name: str) -> None:
    engine, trail = encoded(name)
    statistics, readout = collected(engine, trail)
    assert all(parameter.grad is None for parameter in engine.host.model.parameters())
    assert not any(rows.requires_grad for _, rows in readout)
    assert not statistics.context.requires_grad and not statistics.residual.requires_grad
