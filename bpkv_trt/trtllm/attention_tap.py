"""What stands between TensorRT-LLM's attention layers and its attention plugin while a network is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorrt_llm.layers.attention as stock
from tensorrt_llm.functional import RotaryScalingType, constant

from bpkv_trt.errors import ConfigError
from bpkv_trt.trtllm.collectives import wrapped
from bpkv_trt.trtllm.graph import Graph, ITensor, Value
from bpkv_trt.trtllm.rotation import Rotation, Table, identity_table


@dataclass(frozen=True)
class Attended:
    """One layer at the scoring rows."""

    q: ITensor  # [S, Hq, D], after RoPE
    context: ITensor  # [S, Hq, D], before W_O
    scale: float  # of q.k in the softmax


class AttentionTap:
    """Turns queries and keys by their logical positions, and keeps what the attention does at the scoring rows.

    The plugin gets tables by which nothing turns, and keeps its fast kernels, which are for models with RoPE.
    """

    def __init__(self, graph: Graph, table: Table, inverse: Table, positions: ITensor, rows: ITensor) -> None:
        """table [P, D / 2, 2], inverse: the plugin's own tables of this model; positions [N], rows [S] int32."""
        self.attended: dict[int, Attended] = {}
        self._graph = graph
        self._rotation = Rotation(graph, table, graph.value(positions))
        self._rows = graph.value(rows)
        self._still = {
            "rotary_inv_freq": constant(inverse * 0),
            "rotary_cos_sin": constant(identity_table(table).reshape(1, -1)),
            "rotary_embedding_scale_type": RotaryScalingType.none,
            "rotary_embedding_scale": 1.0,
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Attention layers that are called inside go through the tap. (They take the function from their module.)"""
        self._plugin, stock.gpt_attention = stock.gpt_attention, self._attend
        try:
            yield
        finally:
            stock.gpt_attention = self._plugin

    def _attend(self, **given: Any) -> Any:
        layer, heads, width = given["layer_idx"], given["num_heads"], given["hidden_size_per_head"]
        if isinstance(given["qkv"], (list, tuple)):
            raise ConfigError(
                "Queries, keys and values are products of their own, which BP-KV does not turn; build the engine "
                "with the fused one, which is the default."
            )
        with self._graph.part(f"attention/layer_{layer}"):
            qkv = self._graph.value(given["qkv"].trt_tensor).reshape(-1, heads + 2 * given["num_kv_heads"], width)
            q, packed = self._turned(qkv, heads, given["num_kv_heads"])
            given |= self._still | {"qkv": wrapped(packed.tensor)}
            output, present = self._plugin(**given)
            context = self._graph.value(output.trt_tensor).gather(self._rows).reshape(-1, heads, width)
            scale = 1.0 / (given["q_scaling"] * float(width) ** 0.5)
            self.attended[layer] = Attended(q.gather(self._rows).tensor, context.tensor, scale)
        return output, present

    def _turned(self, qkv: Value, heads: int, kv_heads: int) -> tuple[Value, Value]:
        """[N, Hq + 2 Hkv, D] -> the queries [N, Hq, D], and all packed again [N, (Hq + 2 Hkv) D]."""
        turned = self._rotation.apply(qkv.part(0, heads + kv_heads, axis=1))
        values = qkv.part(heads + kv_heads, kv_heads, axis=1)
        packed = self._graph.concatenate([turned, values], axis=1)
        return turned.part(0, heads, axis=1), packed.reshape(-1, qkv.shape[1] * qkv.shape[2])
