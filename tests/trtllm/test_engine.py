"""TensorRT-RTX builds real engines of the readout, without a GPU; reading an engine back would need one."""

import pytest
import torch

from bpkv_trt.errors import BpkvError
from tests.trtllm.example_model import example_model
from tests.trtllm.readout_network import ReadoutNetwork

TYPES = [torch.float16, torch.bfloat16, torch.float32]
MODELS = {
    "rms": {},
    "layer, softcap": {"final_norm": "layer", "beta": True, "logit_softcap": 30.0, "padding": 8},
    "post-attention norm": {"post_attention_norm": True, "residual_multiplier": 0.22},
}
LARGE = {"width": 512, "vocabulary": 16000, "heads": 8, "head_dim": 64}  # a head far beyond an engine's own 2 MB


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("dtype", TYPES, ids=["fp16", "bf16", "fp32"])
def test_an_engine_for_0_to_64_rows_holds_the_head_once(trt, dtype, changes, ranks):
    network = ReadoutNetwork(trt, example_model(**LARGE | changes).to(dtype), 32, ranks=ranks, rank=ranks - 1)
    own = network.dtype(torch.empty(0, dtype=dtype))
    heads = 8 // ranks
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in network.outputs.items()}
    assert described == {
        "topk_ids": (trt.int32, (-1, 32)),
        "p": (trt.float32, (-1, 32)),
        "covered_mass": (trt.float32, (-1,)),
        "final": (trt.float32, (-1, 32, 512)),
        "readout_0": (own, (-1, 32, heads, 64)),
        "readout_1": (own, (-1, 32, heads, 64)),
    }
    engine = network.build()
    assert engine is not None
    assert all(name.encode() in engine for name in [*described, "residual"])
    weights = {name: value.nbytes for name, value in network.feed.items() if name.startswith("weights/")}
    assert 0 < len(engine) - sum(weights.values()) < 0.5 * weights["weights/head"]


def test_a_projection_of_another_width_builds_no_engine(trt):
    model = example_model()
    model.projections[1] = torch.randn(model.traits.width + 1, model.projections[1].shape[1])
    assert ReadoutNetwork(trt, model, 7).build() is None


def test_types_that_differ_build_no_engine(trt):
    network = ReadoutNetwork(trt, example_model(), 7)
    half = network.value(network.input("half", torch.empty(1, 7).half()))
    network.network.mark_output((half + network.value(network.readout.p)).tensor)
    assert network.build() is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_a_step_without_scoring_rows_has_every_shape(trt, changes, ranks):
    network = ReadoutNetwork(trt, example_model(**changes).to(torch.bfloat16), 7, ranks=ranks)
    assert network.build(usual=0) is not None


def test_a_network_that_needs_a_row_builds_no_engine_for_none(trt):
    network = ReadoutNetwork(trt, example_model(), 7)
    first = network.network.add_slice(network.readout.p, (0, 0), (1, 7), (1, 1))
    network.network.mark_output(first.get_output(0))
    assert network.build(usual=1) is not None
    assert network.build(usual=0) is None


def test_a_layer_that_tensorrt_refuses_is_named(trt):
    network = ReadoutNetwork(trt, example_model(), 7)
    with pytest.raises(BpkvError, match="refused the layer bpkv/graph/topk_0"):
        network.value(network.readout.p).topk(3841)


def test_weights_are_not_copied_to_fp32_and_a_layer_adds_only_its_own_product(trt):
    network = ReadoutNetwork(trt, example_model(layers=3).to(torch.bfloat16), 7)
    layers = [network.network.get_layer(index) for index in range(network.network.num_layers)]
    names = [layer.name for layer in layers if not layer.name.startswith("weights/")]
    assert all(name.startswith("bpkv/readout/") for name in names) and len(set(names)) == len(names)
    own = [name.rpartition("_")[0] for name in names if name.startswith("bpkv/readout/layer_2/")]
    assert own == [f"bpkv/readout/layer_2/{kind}" for kind in ("cast", "reshape", "matmul", "reshape")]
    cast = [tuple(layer.get_input(0).shape) for layer in layers if layer.type == trt.LayerType.CAST]
    assert cast and all(shape[0] == -1 or len(shape) == 1 for shape in cast)
