"""RoPE as layers of a network, from logical positions: the attention plugin would take them from the rows it holds."""

import numpy as np
from numpy.typing import NDArray

from bpkv_trt.trtllm.graph import Graph, Value

Table = NDArray[np.float32]


class Rotation:
    """How the queries and keys of a step's tokens are turned; one object for all layers."""

    def __init__(self, graph: Graph, table: Table, positions: Value) -> None:
        """table [P, D / 2, 2] fp32: cos and sin at every logical position, as TensorRT-LLM makes it for its plugin.

        positions [N] int32, below P.
        """
        half = table.shape[1]
        columns = np.arange(half, dtype=np.int32)
        with graph.part("rotation"):
            both = graph.constant(np.concatenate([table[..., 0], table[..., 1]], axis=1)).gather(positions)  # [N, D]
            cos = both.gather(graph.constant(np.tile(columns, 2)), axis=1)
            sin = both.gather(graph.constant(np.tile(columns + half, 2)), axis=1)
            signs = np.repeat(np.array([[-1, 1]], np.float32), half, axis=1)
            self._cos = cos.reshape(-1, 1, 2 * half)
            self._sin = (sin * graph.constant(signs)).reshape(-1, 1, 2 * half)
            self._partner = graph.constant(np.concatenate([columns + half, columns]))

    def apply(self, x: Value) -> Value:
        """x [N, H, D] -> the same, of x's type: x cos + x' sin in fp32, x' the other half of a head (GPT-NeoX)."""
        wide = x.cast(x.graph.trt.float32)
        return (wide * self._cos + wide.gather(self._partner, axis=2) * self._sin).cast(x.dtype)


def identity_table(table: Table) -> Table:
    """A table of the same shape by which nothing turns: what the plugin gets of queries and keys that have turned."""
    still = np.zeros_like(table)
    still.reshape(-1, 2)[:, 0] = 1
    return still
