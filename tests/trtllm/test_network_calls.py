"""What the readout asks of a network exists in TensorRT 10.14, too: its bindings' own signatures say so."""

from typing import Any

import pytest
import torch

from tests.trtllm.checked_tensorrt import CheckedLayer, CheckedModule, CheckedNetwork
from tests.trtllm.example_model import example_model
from tests.trtllm.readout_network import ReadoutNetwork


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("changes", [{"padding": 14}, {"final_norm": "layer", "logit_softcap": 3.0, "beta": True}])
def test_the_readout_calls_what_tensorrt_10_has(trt, tensorrt_10, changes, ranks):
    called: set[str] = set()

    def wrap(real: Any) -> Any:
        return CheckedModule(real, tensorrt_10) if real is trt else CheckedNetwork(real, tensorrt_10, called)

    model = example_model(post_attention_norm=True, **changes).to(torch.bfloat16)
    ReadoutNetwork(trt, model, 7, ranks=ranks, wrap=wrap)
    assert {"add_topk", "add_matrix_multiply", "add_gather", "add_reduce", "add_cast"} <= called


def test_a_call_that_tensorrt_10_lacks_is_found(trt, tensorrt_10):
    network = CheckedNetwork(None, tensorrt_10, set())
    tensor = object()
    with pytest.raises(AssertionError, match="does not take add_moe"):
        network.add_moe(tensor)
    with pytest.raises(AssertionError, match="does not take add_softmax"):
        network.add_softmax(tensor, axis=1)
    with pytest.raises(AssertionError, match="no imaginary"):
        CheckedModule(trt, tensorrt_10).imaginary  # noqa: B018
    with pytest.raises(AssertionError, match="has no axis"):
        CheckedLayer(None, tensorrt_10["ISoftMaxLayer"]).axis = 1
