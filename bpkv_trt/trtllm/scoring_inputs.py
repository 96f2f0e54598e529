"""What a step of an engine is given beside TensorRT-LLM's own inputs."""

from collections import OrderedDict
from types import ModuleType
from typing import Any, NamedTuple

Range = list[int]  # of a dimension: least, usual, largest
MOST_MEMORY = 2**30  # bytes that TensorRT sets aside for the scoring rows of a step, at least


class ScoringInputs(NamedTuple):
    """TensorRT-LLM's tensors, by their names in the engine; all on the device. S scoring rows of B sequences.

    A step without scoring rows has S = 0, and offsets of 0.
    """

    bpkv_score_rows: Any  # [S] int32: which of the step's packed tokens, those of a sequence ascending
    bpkv_score_offsets: Any  # [B + 1] int32: rows offsets[b] .. offsets[b + 1] are those of sequence b
    bpkv_score_weights: Any  # [S] fp32, summing to 1 in each sequence
    bpkv_pool_pointers: Any  # [1, 2] int64: where K, and V, of the pool's block 0 begins

    @classmethod
    def declare(cls, tensor: type, trt: ModuleType, *, sequences: int, positions: int, rows: int) -> "ScoringInputs":
        """Add them to the network under construction, for so many sequences and scoring rows in a step at most.

        tensor: TensorRT-LLM's `functional.Tensor`. TensorRT chooses its kernels for the positions of one sequence.
        """
        scored = [0, positions, rows]
        bounds = [2, (sequences + 1) // 2 + 1, sequences + 1]

        def declared(name: str, dtype: Any, shape: list[int], **ranges: Range | int) -> Any:
            profile = OrderedDict((key, [value]) for key, value in ranges.items())  # of the one profile
            return tensor(name=name, dtype=dtype, shape=shape, dim_range=profile)

        return cls(
            declared("bpkv_score_rows", trt.int32, [-1], bpkv_rows=scored),
            declared("bpkv_score_offsets", trt.int32, [-1], bpkv_bounds=bounds),
            declared("bpkv_score_weights", trt.float32, [-1], bpkv_rows=scored),
            declared("bpkv_pool_pointers", trt.int64, [1, 2], bpkv_pools=1, bpkv_fields=2),
        )


def most_rows(*, sequences: int, positions: int, tokens: int, logits: int, readout: int) -> int:
    """How many scoring rows a step may have: those of all sequences, or as many as fit into `MOST_MEMORY`.

    tokens: of a step, at most. Of each row the logits of this rank and rows of the head (`readout` = K d numbers)
    are fp32 and live at the same time. One sequence's positions always fit.
    """
    fitting = MOST_MEMORY // (4 * (logits + readout))
    return max(positions, min(sequences * positions, tokens, fitting))
