"""The numbers of the readout's network, layer by layer as TensorRT holds it, against the core and the derivative."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bpkv_trt.core.readout import DirectReadout, final_readout, norm_adjoint
from bpkv_trt.core.topk import topk_distribution
from bpkv_trt.errors import ConfigError
from bpkv_trt.trtllm.ranks import Ranks
from tests.trtllm.example_model import POST_EPS, ExampleModel, example_model
from tests.trtllm.readout_network import ReadoutNetwork, connected_values

MODELS = {
    "rms": {},
    "layer": {"final_norm": "layer", "beta": True},
    "layer without beta": {"final_norm": "layer"},
    "no final norm": {"final_norm": "none"},
    "padded head": {"padding": 14},
    "tied padded head": {"padding": 14, "tied_head": True},
    "softcap": {"logit_softcap": 4.0},
    "no final norm, softcap": {"final_norm": "none", "logit_softcap": 4.0},
    "logit scale": {"logit_scale": 0.0625},
    "all of the final norm": {"final_norm": "layer", "beta": True, "logit_scale": 3.0, "logit_softcap": 5.0},
    "residual multiplier": {"residual_multiplier": 0.22},
    "o_proj bias": {"bias": True},
    "post-attention norm": {"post_attention_norm": True},
    "post-attention norm after a bias": {"post_attention_norm": True, "bias": True, "residual_multiplier": 0.22},
    "parallel block, sinks": {"parallel_block": True, "sink_logits": True},
}
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # relative error of one rounding
SUBNORMAL = 2.0**-25  # absolute error of one rounding to fp16


def close(value: Tensor, truth: Tensor, tolerance: float = 1e-5) -> None:
    assert value.shape == truth.shape
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    torch.testing.assert_close(value.to(truth.dtype), truth, rtol=0, atol=tolerance * largest)


def expect_the_core(model: ExampleModel, values: dict[str, Tensor], k: int) -> None:
    top = topk_distribution(model.logits(), k, model.traits.vocabulary)
    assert torch.equal(values["topk_ids"], top.ids.int())
    close(values["p"], top.p)
    close(values["covered_mass"], top.covered_mass)
    readout = DirectReadout.of(model.context, model.residual, top.ids, top.p, model.traits, model)
    close(values["final"], readout.final)
    for layer, rows in readout:
        close(values[f"readout_{layer}"], rows)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_the_network_gives_what_the_core_gives(trt, changes, rows):
    model = example_model(rows, **changes)
    expect_the_core(model, ReadoutNetwork(trt, model, 7).values(), 7)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 6),
    k=st.integers(1, 70),
    layers=st.integers(1, 3),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([4, 8, 10]),
    width=st.integers(2, 40),
    vocabulary=st.integers(1, 60),
    padding=st.integers(0, 9),
    changes=st.sampled_from(list(MODELS.values())),
)
def test_shapes_of_any_size_give_what_the_core_gives(trt, k, changes, **sizes):
    model = example_model(**sizes | changes)
    values = ReadoutNetwork(trt, model, k).values()
    assert values["p"].shape == (sizes["rows"], min(k, model.traits.vocabulary)), "K is clamped to the vocabulary"
    expect_the_core(model, values, k)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_the_readout_is_the_derivative_of_the_logits(trt, changes):
    """Automatic differentiation in float64 of the path itself, without the core."""
    model = example_model(2, **changes)
    values = ReadoutNetwork(trt, model, 6).values()
    traits, double = model.traits, model.to(torch.float64)
    for layer, projection in enumerate(double.projections):

        def branch(context: Tensor, projection: Tensor = projection) -> Tensor:
            x = context.flatten(1) @ projection.T + (0 if double.bias is None else double.bias)
            if double.post_gamma is not None:
                x = torch.nn.functional.rms_norm(x, x.shape[-1:], double.post_gamma, POST_EPS)
            return x * traits.residual_multiplier

        context = double.context[layer].requires_grad_()
        rest = double.residual - branch(context).detach()  # what all else puts into the residual
        model.residual = rest + branch(context)
        z = model.logits().gather(1, values["topk_ids"].long())
        centred = z - (values["p"].double() * z).sum(-1, keepdim=True)
        truth = torch.stack([torch.autograd.grad(centred[:, k].sum(), context, retain_graph=True)[0] for k in range(6)])
        close(values[f"readout_{layer}"], truth.transpose(0, 1))


@pytest.mark.parametrize("dtype", UNIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_half_precision_rounds_only_what_enters_and_leaves_a_product_of_weights(trt, changes, dtype):
    model = example_model(5, vocabulary=200, width=64, **changes).to(dtype)
    values, u = ReadoutNetwork(trt, model, 7).values(), UNIT[dtype]
    ids, p = values["topk_ids"].long(), values["p"]
    z = model.logits()[:, : model.traits.vocabulary]
    moved = model.traits.logit_scale * u * float(absolute_logits(model).max()) * 2.01  # normed, and the product
    assert (z.gather(1, ids) >= z.topk(7).values - 2 * moved).all()
    assert (p.double().log() - z.gather(1, ids).log_softmax(-1)).abs().max() <= 2 * moved + 1e-6
    final = final_readout(model.residual, ids, p, model.traits, model) * model.traits.residual_multiplier
    close(values["final"], final)
    for layer, projection in enumerate(model.projections):
        rows = final
        if model.post_gamma is not None:
            output = model.attention_branch(layer).to(dtype).float()  # the norm's input, as an engine has it
            rows = norm_adjoint(rows, output, model.post_gamma.float(), POST_EPS)
        rows, weights = rows.double(), projection.double()
        truth = rows @ weights
        entering = (u * rows.abs() + SUBNORMAL + 1e-5 * float(rows.abs().max())) @ weights.abs()
        read = values[f"readout_{layer}"]
        assert read.dtype == dtype
        assert ((read.double().flatten(2) - truth).abs() <= entering + u * truth.abs() * 1.01 + SUBNORMAL).all()


def absolute_logits(model: ExampleModel) -> Tensor:
    """[S, V] sum of |normed| |head|: what a relative error of each normed number moves a logit by at most."""
    x, gamma = model.residual.double(), None if model.gamma is None else model.gamma.double()
    if gamma is not None:
        x = x - x.mean(-1, keepdim=True) if model.traits.final_norm == "layer" else x
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], gamma, model.traits.norm_eps)
    x = x if model.beta is None else x + model.beta.double()
    return x.abs() @ model.head[: model.traits.vocabulary].double().abs().T


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"padding": 14}, {"vocabulary": 9, "padding": 3}, {"final_norm": "none", "logit_softcap": 4.0}, {"rows": 0},
     {"post_attention_norm": True, "bias": True}],
    ids=["rms", "padded", "ranks without K real rows", "softcap", "no rows", "post-attention norm"],
)  # fmt: skip
def test_ranks_agree_with_one_another_and_with_one_rank(trt, ranks, changes):
    model = example_model(**changes)
    alone = ReadoutNetwork(trt, model, 7).values()
    together = connected_values([ReadoutNetwork(trt, model, 7, ranks=ranks, rank=rank) for rank in range(ranks)])
    for values in together:
        assert torch.equal(values["topk_ids"], alone["topk_ids"])
        for name in ("p", "covered_mass", "final"):
            close(values[name], alone[name], 1e-6)
    for layer in range(model.traits.layers):
        close(torch.cat([values[f"readout_{layer}"] for values in together], 2), alone[f"readout_{layer}"], 1e-6)


def test_a_rank_without_any_real_row_adds_nothing(trt):
    model = example_model(vocabulary=20, padding=20)
    together = connected_values([ReadoutNetwork(trt, model, 7, ranks=2, rank=rank) for rank in range(2)])
    expect_the_core(model, together[1] | {"readout_0": joined(together, 0), "readout_1": joined(together, 1)}, 7)


def joined(together: list[dict[str, Tensor]], layer: int) -> Tensor:
    return torch.cat([values[f"readout_{layer}"] for values in together], 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_beyond_the_range_of_exp_keep_their_distribution(trt, ranks):
    model = example_model(logit_scale=60.0)
    top = topk_distribution(model.logits(), 7, model.traits.vocabulary)
    assert model.logits().max() > 100
    for values in connected_values([ReadoutNetwork(trt, model, 7, ranks=ranks, rank=rank) for rank in range(ranks)]):
        assert torch.equal(values["topk_ids"], top.ids.int())
        close(values["p"], top.p, 1e-3)
        close(values["covered_mass"], top.covered_mass, 1e-3)


def test_the_whole_vocabulary_covers_no_more_than_everything(trt):
    mass = ReadoutNetwork(trt, example_model(200), 50).values()["covered_mass"]
    assert (mass > 1 - 1e-6).all() and (mass <= 1).all()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_the_covered_mass_tells_that_a_logit_is_not_finite(trt, spoiled, ranks):
    model = example_model()
    model.head[11] = model.residual.mean(0).sign() * spoiled
    together = connected_values([ReadoutNetwork(trt, model, 7, ranks=ranks, rank=rank) for rank in range(ranks)])
    assert torch.isfinite(model.logits()[:, :11]).all()
    unfit = torch.isnan(model.logits()).any(1) | (model.logits() == float("inf")).any(1)
    assert unfit.any()
    for values in together:
        assert values["covered_mass"][unfit].isnan().all()


def test_padding_of_the_head_may_hold_anything(trt):
    model = example_model(padding=14)
    before = ReadoutNetwork(trt, model, 7).values()
    model.head[model.traits.vocabulary :] = float("nan")
    after = ReadoutNetwork(trt, model, 7).values()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_walk_refuses_a_layer_that_it_does_not_know(trt):
    network = ReadoutNetwork(trt, example_model(), 7)
    unknown = network.network.add_padding_nd(network.input("image", torch.ones(1, 2, 3, 4)), (1, 1), (0, 0))
    with pytest.raises(NotImplementedError, match="padding layer"):
        network.walk()[unknown.get_output(0)]


def test_what_an_engine_cannot_do_is_refused_by_name(trt):
    with pytest.raises(ConfigError, match="3841 likeliest tokens.*at most 3840"):
        ReadoutNetwork(trt, example_model(vocabulary=5000), 3841)
    quantised = example_model()
    quantised.head = quantised.head.to(torch.int8)
    with pytest.raises(ConfigError, match="the output head in fp32, fp16 or bf16"):
        ReadoutNetwork(trt, quantised, 7)
    quantised = example_model()
    quantised.projections[1] = quantised.projections[1].to(torch.int8)
    with pytest.raises(ConfigError, match="output projection of layer 1"):
        ReadoutNetwork(trt, quantised, 7)
    short = example_model()
    short.head = short.head[:40]
    with pytest.raises(ValueError, match="40 rows"):
        ReadoutNetwork(trt, short, 7)


def test_several_ranks_need_collectives():
    with pytest.raises(ValueError, match="all_gather and all_reduce"):
        Ranks(2, 0)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        Ranks(2, 2, lambda tensor: tensor, lambda tensor: tensor)
