"""The readout of an example model in a real TensorRT network, as an engine's network class would add it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.trtllm.graph import Graph, Value
from bpkv_trt.trtllm.ranks import Ranks
from bpkv_trt.trtllm.readout import HeadWeights, PostAttentionNorm, Readout
from tests.trtllm.example_model import POST_EPS, ExampleModel
from tests.trtllm.network_walk import NetworkReading, NetworkWalk


class ReadoutNetwork:
    """Of rank `rank` where there are several: its share of the head's rows and of the query heads."""

    def __init__(
        self,
        trt: ModuleType,
        model: ExampleModel,
        k: int,
        *,
        ranks: int = 1,
        rank: int = 0,
        wrap: Callable[[Any], Any] = lambda real: real,
    ) -> None:
        """wrap: what stands before the network and its module while the readout is added."""
        self.trt = trt
        self.feed: dict[str, Tensor | Callable[[], Tensor]] = {}
        self.sent: list[Any] = []  # what goes into a collective
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        self.network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        residual = self.input("residual", model.residual)
        gamma, beta = (
            None if value is None else self.weight(name, value)
            for name, value in (("gamma", model.gamma), ("beta", model.beta))
        )
        share = -(-model.head.shape[0] // ranks)
        padded = torch.cat([model.head, model.head.new_zeros(share * ranks - model.head.shape[0], model.head.shape[1])])
        head = self.weight("head", padded[rank * share : (rank + 1) * share])
        collectives = Ranks(ranks, rank, self._gather(ranks), self._reduce) if ranks > 1 else Ranks()
        self.readout = Readout(
            wrap(self.network), wrap(trt), residual, HeadWeights(head, gamma, beta), model.traits, k, collectives
        )
        self.layers = []
        for layer, projection in enumerate(model.projections):
            own = projection.chunk(ranks, dim=1)[rank]
            post_norm = None
            if model.post_gamma is not None:
                output = self.input(f"output_{layer}", model.attention_branch(layer).to(projection.dtype))
                post_norm = PostAttentionNorm(output, self.weight(f"post_gamma_{layer}", model.post_gamma), POST_EPS)
            self.layers.append(self.readout.layer(layer, self.weight(f"projection_{layer}", own), post_norm))
        for name, tensor in self.outputs.items():
            tensor.name = name
            self.network.mark_output(tensor)

    @property
    def outputs(self) -> dict[str, Any]:
        shared = {name: getattr(self.readout, name) for name in ("topk_ids", "p", "covered_mass", "final")}
        return shared | {f"readout_{layer}": tensor for layer, tensor in enumerate(self.layers)}

    def walk(self) -> NetworkWalk:
        return NetworkWalk(NetworkReading(self.network, self.trt), self.feed)

    def values(self) -> dict[str, Tensor]:
        walk = self.walk()
        return {name: walk[tensor] for name, tensor in self.outputs.items()}

    def build(self, usual: int = 8) -> bytes | None:
        """The engine for 0 to 64 scoring rows, or None where TensorRT refuses the network at the usual number.

        (The builder follows the shapes through the network at that number, not at the least.)
        """
        config, profile = self.builder.create_builder_config(), self.builder.create_optimization_profile()
        for tensor in map(self.network.get_input, range(self.network.num_inputs)):
            sizes = tuple(tensor.shape)[1:]
            profile.set_shape(tensor.name, (0, *sizes), (usual, *sizes), (64, *sizes))
        config.add_optimization_profile(profile)
        plan = self.builder.build_serialized_network(self.network, config)
        return None if plan is None else bytes(plan)

    def input(self, name: str, value: Tensor | Callable[[], Tensor], dtype: Any = None, shape: Any = None) -> Any:
        if isinstance(value, Tensor):
            dtype, shape = self.dtype(value), value.shape[1:]
        self.feed[name] = value
        return self.network.add_input(name, dtype, (-1, *shape))

    def weight(self, name: str, value: Tensor) -> Any:
        value = value.contiguous()
        layer = self.network.add_constant(
            tuple(value.shape), self.trt.Weights(self.dtype(value), value.data_ptr(), value.numel())
        )
        layer.name = f"weights/{name}"
        self.feed[layer.name] = value  # which also keeps the memory until the engine is built
        return layer.get_output(0)

    def value(self, tensor: Any) -> Value:
        return Graph(self.network, self.trt).value(tensor)

    def dtype(self, value: Tensor) -> Any:
        types = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.int8: "int8"}
        return getattr(self.trt, types[value.dtype])

    def _gather(self, ranks: int) -> Callable[[Any], Any]:
        def all_gather(tensor: Any) -> Any:
            assert tensor.dtype == self.trt.float32
            self._send(tensor)
            return self.input("received", missing, tensor.dtype, [ranks * tensor.shape[1]])

        return all_gather

    def _reduce(self, tensor: Any) -> Any:
        self._send(tensor)
        return self.input("reduced", missing, tensor.dtype, tuple(tensor.shape)[1:])

    def _send(self, tensor: Any) -> None:
        tensor.name = f"sent_{len(self.sent)}"
        self.network.mark_output(tensor)
        self.sent.append(tensor)


def missing() -> Tensor:
    raise AssertionError("the collectives of this network are not connected")


def connected_values(networks: list[ReadoutNetwork]) -> list[dict[str, Tensor]]:
    """The values of networks of all ranks, which exchange what they send."""
    walks = [network.walk() for network in networks]
    for network in networks:
        network.feed["received"] = lambda: torch.cat([w[n.sent[0]] for w, n in zip(walks, networks, strict=True)], 1)
        network.feed["reduced"] = lambda: sum(w[n.sent[1]] for w, n in zip(walks, networks, strict=True))
    return [
        {name: walk[tensor] for name, tensor in network.outputs.items()}
        for walk, network in zip(walks, networks, strict=True)
    ]
