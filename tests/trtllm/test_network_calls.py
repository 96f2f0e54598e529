"""What the readout asks of a network exists in TensorRT 10.14, too: its bindings' own signatures say so."""

import re
from typing import Any

import pytest
import torch

from tests.trtllm.example_model import example_model
from tests.trtllm.readout_network import ReadoutNetwork

Description = dict[str, dict[str, Any]]


class CheckedModule:
    """TensorRT-RTX, as far as TensorRT 10 has the same."""

    def __init__(self, trt: Any, described: Description) -> None:
        self._trt, self._described = trt, described

    def __getattr__(self, name: str) -> Any:
        assert name in self._described, f"TensorRT 10 has no {name}"
        return getattr(self._trt, name)


class CheckedNetwork:
    """A network of TensorRT-RTX that takes only calls that TensorRT 10 takes."""

    def __init__(self, network: Any, described: Description, called: set[str]) -> None:
        self._network, self._described, self._called = network, described, called

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            overloads = signatures(self._described["INetworkDefinition"].get(name, ""), name)
            returned = [kind for names, kinds, kind in overloads if self._fits(names, kinds, given, named)]
            assert returned, f"TensorRT 10 does not take {name} with {given} and {named}: {overloads}"
            self._called.add(name)
            return CheckedLayer(getattr(self._network, name)(*given, **named), self._described[returned[0]])

        return call

    def _fits(self, names: list[str], kinds: list[str], given: Any, named: dict[str, Any]) -> bool:
        if len(given) > len(names) or sorted(names[len(given) :]) != sorted(named):
            return False
        arguments = dict(zip(names, given, strict=False)) | named
        enumerations = [
            (kinds[names.index(name)], value) for name, value in arguments.items() if hasattr(value, "value")
        ]
        return all(value.name in self._described[kind] for kind, value in enumerations)


class CheckedLayer:
    def __init__(self, layer: Any, members: dict[str, str]) -> None:
        vars(self).update(layer=layer, members=members)

    def __getattr__(self, name: str) -> Any:
        assert name in self.members
        return getattr(self.layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self.members, f"TensorRT 10's layer has no {name}"
        setattr(self.layer, name, value)


def signatures(docstring: str, name: str) -> list[tuple[list[str], list[str], str]]:
    """The parameters' names, their types, and the type returned, of every overload."""
    found = re.findall(rf"{name}\(self: [\w.]+, (.*)\) -> [\w.]*?(\w+)$", docstring, re.MULTILINE)
    parameters = [([each.partition(": ") for each in listed.split(", ")], returned) for listed, returned in found]
    return [
        ([name for name, _, _ in each], [kind.rpartition(".")[2] for _, _, kind in each], returned)
        for each, returned in parameters
    ]


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
