"""What a step of an engine is given beside TensorRT-LLM's own inputs."""

from collections import OrderedDict
from types import ModuleType
from typing import Any, NamedTuple

Range = list[int]  # of a dimension: least, usual, largest


class ScoringInputs(NamedTuple):
    """TensorRT-LLM's tensors, by their names in the engine; all on the device. S scoring rows of B sequences.

    A step without scoring rows has S = 0, and offsets of 0.
    """

    bpkv_score_rows: Any  # [S] int32: which of the step's packed tokens, those of a sequence ascending
    bpkv_score_offsets: Any  # [B + 1] int32: rows offsets[b] .. offsets[b + 1] are those of sequence b
    bpkv_score_weights: Any  # [S] fp32, summing to 1 in each sequence
    bpkv_pool_pointers: Any  # [1, 2] int64: where K, and V, of the pool's block 0 begins

    @classmethod
    def declare(cls, tensor: type, trt: ModuleType, *, sequences: int, positions: int) -> "ScoringInputs":
        """Add them to the network under construction, for at most so many sequences and scoring positions of each.

        tensor: TensorRT-LLM's `functional.Tensor`. TensorRT chooses its kernels for the rows of one sequence.
        """
        rows = [0, positions, sequences * positions]
        bounds = [2, (sequences + 1) // 2 + 1, sequences + 1]

        def declared(name: str, dtype: Any, shape: list[int], **ranges: Range | int) -> Any:
            profile = OrderedDict((key, [value]) for key, value in ranges.items())  # of the one profile
            return tensor(name=name, dtype=dtype, shape=shape, dim_range=profile)

        return cls(
            declared("bpkv_score_rows", trt.int32, [-1], bpkv_rows=rows),
            declared("bpkv_score_offsets", trt.int32, [-1], bpkv_bounds=bounds),
            declared("bpkv_score_weights", trt.float32, [-1], bpkv_rows=rows),
            declared("bpkv_pool_pointers", trt.int64, [1, 2], bpkv_pools=1, bpkv_fields=2),
        )
