"""Tensor parallelism as the readout meets it."""

from collections.abc import Callable
from dataclasses import dataclass

from bpkv_trt.trtllm.graph import ITensor

Collective = Callable[[ITensor], ITensor]


@dataclass(frozen=True)
class Ranks:
    """Which of `count` ranks a network is for, and how it reaches the others; one rank needs no collectives.

    all_gather: [S, n] fp32 of each rank -> [S, count n] fp32, in the order of ranks (TensorRT-LLM's `allgather` along
    the last dimension). all_reduce: [S, K, d] of the head's type -> their sum, of the same shape and type. Both must
    take S = 0.
    """

    count: int = 1
    rank: int = 0
    all_gather: Collective | None = None
    all_reduce: Collective | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"rank is {self.rank}; expected 0 to {self.count - 1}.")
        if self.count > 1 and (self.all_gather is None or self.all_reduce is None):
            raise ValueError(f"{self.count} ranks need all_gather and all_reduce.")
