"""The closed-form adjoints against automatic differentiation in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.readout import DirectReadout, final_readout, fisher_probes
from bpkv_trt.core.traits import ModelTraits

WIDTH, HEADS, SIZE, VOCABULARY, LAYERS, POSITIONS = 24, 4, 8, 40, 3, 5


@dataclass
class Weights:
    head: Tensor  # [V, d]
    gamma: Tensor
    beta: Tensor | None
    projection: Tensor  # [L, d, Hq D]
    bias: Tensor | None
    post_gamma: Tensor | None

    def head_rows(self, ids: Tensor) -> Tensor:
        return self.head[ids]

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        return self.gamma, self.beta

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        return self.projection[layer], self.bias

    def post_attention_norm(self, layer: int) -> tuple[Tensor, float] | None:
        return None if self.post_gamma is None else (self.post_gamma, 1e-5)


def make_weights(*, beta: bool = False, bias: bool = False, post_norm: bool = False) -> Weights:
    return Weights(
        head=torch.randn(VOCABULARY, WIDTH) * 0.5,
        gamma=1 + torch.randn(WIDTH) * 0.3,
        beta=torch.randn(WIDTH) * 0.2 if beta else None,
        projection=torch.randn(LAYERS, WIDTH, HEADS * SIZE) * 0.3,
        bias=torch.randn(WIDTH) * 0.2 if bias else None,
        post_gamma=1 + torch.randn(WIDTH) * 0.3 if post_norm else None,
    )


def make_traits(**changes: object) -> ModelTraits:
    plain = ModelTraits("numeric", LAYERS, HEADS, 2, SIZE, WIDTH, VOCABULARY, SIZE**-0.5, norm_eps=1e-5)
    return replace(plain, **changes)


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double()


def true_logits(residual: Tensor, weights: Weights, traits: ModelTraits) -> Tensor:
    """[V] logits of one position, in float64, from torch's own norms."""
    x = residual
    if traits.final_norm == "rms":
        x = rms_norm(x, weights.gamma) + (0 if weights.beta is None else weights.beta.double())
    elif traits.final_norm == "layer":
        beta = None if weights.beta is None else weights.beta.double()
        x = torch.nn.functional.layer_norm(x, (WIDTH,), weights.gamma.double(), beta, eps=1e-5)
    z = weights.head.double() @ x * traits.logit_scale
    return z if traits.logit_softcap is None else torch.tanh(z / traits.logit_softcap) * traits.logit_softcap


TRAITS = {
    "rms": {},
    "layer": {"final_norm": "layer"},
    "none": {"final_norm": "none"},
    "softcap": {"logit_softcap": 2.0},
    "scale": {"logit_scale": 0.0625},
    "layer, scale and softcap": {"final_norm": "layer", "logit_scale": 3.0, "logit_softcap": 4.0},
    "none and softcap": {"final_norm": "none", "logit_softcap": 2.0},
}


def centred(p: Tensor, z: Tensor) -> Tensor:
    return z - (p * z).sum(-1, keepdim=True)


@pytest.mark.parametrize("changes", TRAITS.values(), ids=TRAITS.keys())
@pytest.mark.parametrize("beta", [False, True])
def test_the_final_readout_is_the_derivative_of_the_logits(changes, beta):
    traits, weights = make_traits(**changes), make_weights(beta=beta)
    residual = torch.randn(POSITIONS, WIDTH) * 2 + 0.5
    ids = torch.stack([torch.randperm(VOCABULARY)[:6] for _ in range(POSITIONS)])
    p = torch.softmax(torch.randn(POSITIONS, 6), -1)
    u = final_readout(residual, ids, p, traits, weights)
    move = torch.randn(POSITIONS, WIDTH).double()
    for m in range(POSITIONS):
        _, dz = torch.func.jvp(lambda x: true_logits(x, weights, traits), (residual[m].double(),), (move[m],))
        exact = centred(p[m].double(), dz[ids[m]])
        torch.testing.assert_close(u[m].double() @ move[m], exact, rtol=1e-4, atol=1e-5 * float(dz.abs().max()))


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_direct_readout_is_the_derivative_along_the_residual_path(multiplier, post_norm, bias):
    traits = make_traits(residual_multiplier=multiplier, post_attention_norm=post_norm, sliding_layers=frozenset({1}))
    weights = make_weights(bias=bias, post_norm=post_norm)
    context, residual = torch.randn(LAYERS, POSITIONS, HEADS, SIZE), torch.randn(POSITIONS, WIDTH)
    ids = torch.stack([torch.randperm(VOCABULARY)[:6] for _ in range(POSITIONS)])
    p = torch.softmax(torch.randn(POSITIONS, 6), -1)
    readout = DirectReadout.of(context, residual, ids, p, traits, weights)

    def branch(c: Tensor, layer: int) -> Tensor:
        out = weights.projection[layer].double() @ c.flatten()
        out = out if weights.bias is None else out + weights.bias.double()
        out = out if weights.post_gamma is None else rms_norm(out, weights.post_gamma)
        return out * multiplier

    layers = []
    for layer, rows in readout:
        layers.append(layer)
        for m in range(POSITIONS):
            c = context[layer, m].double()
            rest = residual[m].double() - branch(c, layer)  # what the other branches put into the residual
            _, dz = torch.func.jvp(
                lambda x, layer=layer, rest=rest: true_logits(rest + branch(x, layer), weights, traits),
                (c,),
                (move := torch.randn(HEADS, SIZE).double(),),
            )
            exact = centred(p[m].double(), dz[ids[m]])
            result = torch.einsum("khd,hd->k", rows[m].double(), move)
            torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-5 * float(dz.abs().max()))
    assert layers == [0, 2]
    assert len(list(readout)) == 2, "it can be iterated again"


def test_half_precision_weights_are_read_in_fp32():
    traits, weights = make_traits(), make_weights()
    halves = replace(weights, head=weights.head.bfloat16(), projection=weights.projection.bfloat16())
    rounded = replace(weights, head=halves.head.float(), projection=halves.projection.float())
    context, residual = torch.randn(LAYERS, POSITIONS, HEADS, SIZE), torch.randn(POSITIONS, WIDTH)
    ids, p = torch.randint(0, VOCABULARY, (POSITIONS, 6)), torch.softmax(torch.randn(POSITIONS, 6), -1)
    pairs = zip(
        DirectReadout.of(context, residual, ids, p, traits, halves),
        DirectReadout.of(context, residual, ids, p, traits, rounded),
        strict=True,
    )
    assert all(torch.equal(first[1], second[1]) and first[1].dtype == torch.float32 for first, second in pairs)


def test_fisher_probes_have_the_fisher_matrix_as_second_moment():
    p = torch.softmax(torch.randn(2, 5), -1)
    xi = fisher_probes(p, 200_000, torch.Generator().manual_seed(1)).double()
    assert xi.shape == (2, 200_000, 5)
    moment = torch.einsum("mrk,mrj->mkj", xi, xi) / 200_000
    fisher = torch.diag_embed(p.double()) - p.double()[:, :, None] * p.double()[:, None]
    torch.testing.assert_close(moment, fisher, rtol=0, atol=2e-3)
    assert xi.sum(-1).abs().max() < 1e-5
    assert torch.equal(
        fisher_probes(p, 3, torch.Generator().manual_seed(7)), fisher_probes(p, 3, torch.Generator().manual_seed(7))
    )
