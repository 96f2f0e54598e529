"""Layers that TensorRT-RTX lacks, in a network of it: torch says what comes out, in a walk through the network."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor

from tests.trtllm.checked_tensorrt import CheckedModule, CheckedNetwork, Description
from tests.trtllm.network_walk import Feed, NetworkReading, NetworkWalk

Evaluate = Callable[..., Tensor]


class OpaqueLayers:
    """Each has one output, which is given to the network as an input."""

    def __init__(self, trt: ModuleType, network: Any) -> None:
        self.trt, self.network = trt, network
        self.added: list[OpaqueLayer] = []
        self._reading: NetworkReading | None = None

    def add(self, kind: str, inputs: Sequence[Any], dtype: Any, shape: Sequence[int], evaluate: Evaluate) -> Any:
        """evaluate: from the values of the inputs, each None where the input is."""
        given = self.network.add_input(f"opaque/{kind}_{len(self.added)}", dtype, tuple(shape))
        output = self.network.add_identity(given).get_output(0)  # an input cannot be an output
        self.added.append(OpaqueLayer(given, output, list(inputs), evaluate))
        return self.added[-1]

    def walk(self, feed: Feed) -> NetworkWalk:
        if self._reading is None or not self._reading.still_of(self.network):
            self._reading = NetworkReading(self.network, self.trt)
        whole = dict(feed)
        walk = NetworkWalk(self._reading, whole)
        own = weakref.proxy(walk)  # what is fed goes with the walk, not when cycles are looked for

        def given(layer: "OpaqueLayer") -> Callable[[], Tensor]:
            return lambda: layer.evaluate(*(None if each is None else own[each] for each in layer.inputs))

        whole |= {layer.given.name: given(layer) for layer in self.added}
        return walk


@dataclass
class OpaqueLayer:
    given: Any
    output: Any
    inputs: list[Any]
    evaluate: Evaluate
    name: str = ""
    plugin: "RecordedPlugin | None" = None

    def get_output(self, index: int) -> Any:
        assert index == 0
        return self.output


@dataclass
class RecordedPlugin:
    """What a creator made: evaluates as the test says."""

    name: str
    fields: dict[str, Any]
    output: Callable[[Mapping[str, Any], Sequence[Any]], tuple[Any, Sequence[int]]]  # type and shape, by fields
    evaluate: Callable[..., Tensor]  # by the fields, then the inputs


class PluginNetwork(CheckedNetwork):
    """A network of TensorRT-RTX as TensorRT 10: other calls are checked, and layers of plugins are opaque."""

    def __init__(self, opaque: OpaqueLayers, described: Description) -> None:
        super().__init__(opaque.network, described, set())
        self.opaque = opaque

    def add_plugin_v3(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], plugin: RecordedPlugin) -> OpaqueLayer:
        self.check("add_plugin_v3", inputs, shape_inputs, plugin)
        assert not shape_inputs
        dtype, shape = plugin.output(plugin.fields, inputs)
        layer = self.opaque.add(
            plugin.name, inputs, dtype, shape, lambda *values: plugin.evaluate(plugin.fields, *values)
        )
        layer.plugin = plugin
        return layer


@dataclass
class PluginModule(CheckedModule):
    """TensorRT-RTX's module as TensorRT 10's, with a registry of the test's plugins."""

    trt: ModuleType
    described: Description
    creators: dict[tuple[str, str, str], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.trt, self.described)

    def get_plugin_registry(self) -> "PluginModule":
        return self

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


@dataclass
class Creator:
    output: Callable[[Mapping[str, Any], Sequence[Any]], tuple[Any, Sequence[int]]]
    evaluate: Callable[..., Tensor]

    def create_plugin(self, name: str, collection: Any, phase: Any) -> RecordedPlugin:
        assert phase.name == "BUILD"
        fields = {each.name: each.data for each in collection}
        return RecordedPlugin(name, fields, self.output, self.evaluate)
