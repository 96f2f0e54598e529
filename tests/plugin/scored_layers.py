"""Layers of sequences in one pool as TensorRT-LLM keeps it, the plugin's inputs for each, and the core's scores."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.kernels.bundle import checksum
from bpkv_trt.kernels.configuration import KernelConfiguration
from bpkv_trt.kernels.paged import CacheType
from tests.kernels.attended import Attended
from tests.kernels.scored import readings, truth
from tests.plugin.host import CHAR, FLOAT32, INT32, INT64, UNKNOWN, Field

DTYPES = {
    CacheType.FP32: torch.float32,
    CacheType.FP16: torch.float16,
    CacheType.BF16: torch.bfloat16,
    CacheType.FP8: torch.float8_e4m3fn,
    CacheType.INT8: torch.int8,
}
NOWHERE = 10**8  # a block so far past the pool that touching it ends the process


@dataclass
class ScoredLayers:
    """`attended` has one layer each, of the same sequences; the pool has one more, of NaN, before them."""

    configuration: KernelConfiguration
    attended: list[Attended]
    readings: list[dict[str, Any]]
    pool: Tensor  # [blocks, layers, K or V, Hkv, tokens per block, D]
    block_offsets: Tensor  # [pools, B, 2, P] int32
    spare: int = 2  # blocks that a table has room for behind the longest sequence

    @classmethod
    def random(
        cls, configuration: KernelConfiguration, lengths: list[int], counts: list[int], layers: int = 1
    ) -> "ScoredLayers":
        """Sequences of these lengths in rows, with so many scoring positions each."""
        cache = DTYPES[configuration.cache]
        quantised = cache.itemsize == 1
        attended = [
            Attended.random(
                [[length] * configuration.kv_heads for length in lengths],
                counts,
                device=torch.device("cpu"),
                group=configuration.query_heads // configuration.kv_heads,
                head_dim=configuration.head_dim,
                cache=cache,
                queries=configuration.activations,
                sharpness=2.0,
                options={"softcap": configuration.softcap},
                shared_pages=True,
                page_size=configuration.page_size,
                **({"key_scale": 0.3, "value_scale": 0.2} if quantised else {}),
            )
            for _ in range(layers)
        ]
        given = [readings(each, configuration.channels, probes=configuration.probes) for each in attended]
        return cls(configuration, attended, given, *_pool(configuration, attended, lengths, cls.spare))

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(heads[0]) for heads in self.attended[0].keys], dtype=torch.int32)

    def fields(self, layer: int, bundle: bytes, *, carried: bool) -> list[Field]:
        """Of the layer's plugin."""
        configuration, cache = self.configuration, self.attended[layer].laid.cache
        numbers = {
            "abi": 1,
            "layer_in_pool": layer + 1,
            "pool": 1,
            "query_heads": configuration.query_heads,
            "kv_heads": configuration.kv_heads,
            "head_dim": configuration.head_dim,
            "tokens_per_block": configuration.page_size,
            "top_k": configuration.channels,
            "positions": configuration.positions,
        }
        scales = {
            "scale": self.attended[layer].options["scale"],
            "key_scale": cache.key_scale,
            "value_scale": cache.value_scale,
        }
        texts = {"cache": configuration.cache.value, "activations": CacheType.of(configuration.activations).value}
        fields = [Field(name, INT32, number.to_bytes(4, "little"), 1) for name, number in numbers.items()]
        fields += [
            Field(name, FLOAT32, torch.tensor(number, dtype=torch.float32).numpy().tobytes(), 1)
            for name, number in scales.items()
        ]
        fields += [Field(name, CHAR, text.encode(), len(text)) for name, text in texts.items()]
        fields.append(Field("kernels_checksum", INT64, checksum(bundle).to_bytes(8, "little", signed=True), 1))
        return fields + [Field("kernels", UNKNOWN, bundle, len(bundle))] * carried

    def inputs(self, layer: int) -> list[Tensor]:
        """In the plugin's order. The layer's pool is the second one; the first has no blocks."""
        given = self.readings[layer]
        rows, channels = given["readout"].shape[:2]
        p = torch.full((rows, channels), torch.nan) if given["p"] is None else given["p"]  # not read for probes
        addresses = torch.tensor([[0, 0], [self.pool.data_ptr()] * 2])
        return [
            given["q"].contiguous(),
            given["context"],
            given["readout"],
            p,
            given["weights"],
            self.attended[layer].offsets,
            self.block_offsets,
            self.lengths,
            addresses,
        ]

    def truth(self, layer: int, longest: int) -> tuple[Tensor, Tensor]:
        """The core's scores [B, Hkv, longest] in float64 and the error that fp32 may make."""
        return truth(self.attended[layer], self.readings[layer], longest)


def _pool(
    configuration: KernelConfiguration, attended: list[Attended], lengths: list[int], spare: int
) -> tuple[Tensor, Tensor]:
    size, layers = configuration.page_size, len(attended) + 1
    blocks = [-(-length // size) for length in lengths]
    width = max(blocks) + spare
    numbers = torch.randperm(sum(blocks)).split(blocks)
    shape = (sum(blocks), layers, 2, configuration.kv_heads, size, configuration.head_dim)
    dtype = DTYPES[configuration.cache]
    pool = torch.full(shape, 127 if dtype == torch.int8 else torch.nan).to(dtype)
    table = torch.full((2, len(lengths), 2, width), NOWHERE, dtype=torch.int32)
    for sequence, own in enumerate(numbers):
        for kind in range(2):
            table[1, sequence, kind, : len(own)] = own.int() * (2 * layers) + kind
        for layer, each in enumerate(attended):
            for kind, rows in enumerate((each.keys[sequence], each.values[sequence])):
                for head, held in enumerate(rows):
                    row = torch.arange(len(held))
                    pool[own[row // size], layer + 1, kind, head, row % size] = held
    return pool, table
