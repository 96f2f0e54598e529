"""The plugin `BpkvScore` in a TensorRT network: one layer for every attention layer whose entries are scored."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from bpkv_trt.errors import BpkvError, ConfigError
from bpkv_trt.kernels.arguments import expect_finite, expect_int
from bpkv_trt.kernels.paged import CacheType
from bpkv_trt.trtllm.plugin_library import ABI, NAME, NAMESPACE, VERSION
from bpkv_trt.trtllm.score_kernels import ScoreKernels

MOST = 2**30 - 1  # layers, pools: the plugin counts in int32


class ScoreInputs(NamedTuple):
    """Tensors of a network, on the device, in the plugin's order; A is the type of the activations.

    S scoring rows of B sequences; K logits (or probes: then `p` is not read).
    """

    q: Any  # [S, Hq, D] A, after RoPE
    context: Any  # [S, Hq, D] A: the attention's output, which also says that the pool is written
    readout: Any  # [S, K, Hq, D] A, centred
    p: Any  # [S, K] fp32
    weights: Any  # [S] fp32, summing to 1 in each sequence
    offsets: Any  # [B + 1] int32: rows offsets[b] .. offsets[b + 1] are those of sequence b
    block_offsets: Any  # [pools, B, 2, P] int32, TensorRT-LLM's kv_cache_block_offsets
    lengths: Any  # [B] int32: rows in the pool, this step's included
    pool_addresses: Any  # [pools, 2] int64: where K, and V, of each pool's block 0 begins


@dataclass
class ScorePlugin:
    """The plugin's layers of one network.

    The first one carries the kernels; the others name them by their checksum and share them when the engine is loaded.
    """

    trt: ModuleType  # tensorrt, in whose registry the plugin is (`PluginLibrary.register`)
    network: Any  # trt.INetworkDefinition
    kernels: ScoreKernels
    layers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError for kernels of another pool than TensorRT-LLM's."""
        if not self.kernels.configuration.shared_pages:
            raise ConfigError("The kernels read pages of one head; an engine needs them with shared_pages=True.")

    def add_layer(
        self,
        inputs: ScoreInputs,
        *,
        name: str,
        layer_in_pool: int,
        pool: int = 0,
        scale: float,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Any:
        """Score the entries of one attention layer: [B, Hkv, T] fp32, T = 0 in a step without scoring rows.

        T is what the longest table of blocks can hold; past a sequence's length scores are 0. layer_in_pool: among the
        layers of this pool. scale: of q.k in the attention's softmax; key_scale, value_scale: what a number of the pool
        is multiplied by. Raises TypeError or ValueError for numbers that do not fit, BpkvError where the plugin or
        TensorRT refuses, which a line of the log explains.
        """
        configuration = self.kernels.configuration
        for what, index in (("layer_in_pool", layer_in_pool), ("pool", pool)):
            expect_int(what, index, 0, MOST)
        for what, factor in (("scale", scale), ("key_scale", key_scale), ("value_scale", value_scale)):
            expect_finite(what, factor)
        numbers = {
            "abi": ABI,
            "layer_in_pool": layer_in_pool,
            "pool": pool,
            "query_heads": configuration.query_heads,
            "kv_heads": configuration.kv_heads,
            "head_dim": configuration.head_dim,
            "tokens_per_block": configuration.page_size,
            "top_k": configuration.channels,
            "positions": configuration.positions,
        }
        scales = {"scale": scale, "key_scale": key_scale, "value_scale": value_scale}
        texts = {"cache": configuration.cache.value, "activations": CacheType.of(configuration.activations).value}
        kinds = self.trt.PluginFieldType
        fields = [self.trt.PluginField(key, np.array([value], np.int32), kinds.INT32) for key, value in numbers.items()]
        fields += [
            self.trt.PluginField(key, np.array([value], np.float32), kinds.FLOAT32) for key, value in scales.items()
        ]
        fields += [
            self.trt.PluginField(key, np.frombuffer(value.encode(), np.int8), kinds.CHAR)
            for key, value in texts.items()
        ]
        checksum = np.array([self.kernels.checksum], np.int64)
        fields.append(self.trt.PluginField("kernels_checksum", checksum, kinds.INT64))
        if self.layers == 0:
            fields.append(self.trt.PluginField("kernels", self.kernels.bundle, kinds.UNKNOWN))

        creator = self.trt.get_plugin_registry().get_creator(NAME, VERSION, NAMESPACE)
        if creator is None:
            raise BpkvError(f"The plugin {NAME} is not in TensorRT's registry; call PluginLibrary.register before.")
        plugin = creator.create_plugin(name, self.trt.PluginFieldCollection(fields), self.trt.TensorRTPhase.BUILD)
        layer = None if plugin is None else self.network.add_plugin_v3(list(inputs), [], plugin)
        if layer is None:
            raise BpkvError(f"The plugin {NAME} could not be added as {name}; the line before it says why.")
        layer.name = name
        self.layers += 1
        return layer.get_output(0)
