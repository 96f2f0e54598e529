"""The inputs that TensorRT-LLM declares for a decoder with a paged cache, packed tokens and the attention plugin."""

from typing import NamedTuple

Dimension = int | list[int]  # known, or its least, usual and largest


class InputSizes(NamedTuple):
    layers: int
    tokens_per_block: int
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int

    def inputs(self) -> dict[str, tuple[str, list[Dimension]]]:
        """By name: the type, and the dimensions."""
        pools = [1, 1, self.layers]
        rows, tokens, positions = map(_up_to, (self.max_batch_size, self.max_num_tokens, self.max_seq_len))
        blocks = _up_to(-(-self.max_seq_len // self.tokens_per_block))
        table: list[Dimension] = [pools, rows, 2, blocks]
        return {
            "input_ids": ("int32", [tokens]),
            "position_ids": ("int32", [tokens]),
            "last_token_ids": ("int32", [rows]),
            "kv_cache_block_offsets": ("int32", table),
            "host_kv_cache_block_offsets": ("int32", table),
            "host_kv_cache_pool_pointers": ("int64", [pools, 2]),
            "host_kv_cache_pool_mapping": ("int32", [self.layers, 2]),
            "sequence_length": ("int32", [rows]),
            "host_request_types": ("int32", [rows]),
            "host_past_key_value_lengths": ("int32", [rows]),
            "context_lengths": ("int32", [rows]),
            "host_context_lengths": ("int32", [rows]),
            "host_runtime_perf_knobs": ("int64", [16]),
            "host_context_progress": ("int64", [1]),
            "host_max_attention_window_sizes": ("int32", [self.layers]),
            "host_sink_token_length": ("int32", [1]),
            "cache_indirection": ("int32", [rows, 1, positions]),
        }


def _up_to(most: int) -> list[int]:
    return [1, (most + 1) // 2, most]
