#pragma once

#include <NvInferRuntime.h>

#include <array>

#include "score_fields.h"

namespace bpkv {

/// Places of the inputs; output 0 is the scores.
enum Input : std::int32_t {
    input_q,
    input_context,
    input_readout,
    input_p,
    input_weights,
    input_offsets,
    input_block_offsets,
    input_lengths,
    input_pool_addresses,
    input_count,
};
inline constexpr std::int32_t output_count = 1;

inline constexpr std::array<char const*, input_count> input_names{
    "q", "context", "readout", "p", "weights", "offsets", "block_offsets", "lengths", "pool_addresses"};

/// Raises Refusal for other counts of inputs or outputs.
void expect_counts(std::int32_t inputs, std::int32_t outputs);

/// The one type that an input (or, at `input_count`, the output) has.
nvinfer1::DataType tensor_type(std::int32_t place, NumberType activations);

}  // namespace bpkv
