#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#include "score_fields.h"

namespace bpkv {

/// How much one call scores: what differs from step to step. All are checked to be within what kernels can count.
struct ScoreShape {
    std::int64_t rows = 0;       // S, of all sequences
    std::int64_t sequences = 0;  // B
    std::int64_t blocks = 0;     // P, of a sequence's table
    std::int64_t capacity = 0;   // rows of the cache that P blocks hold

    bool empty() const { return rows == 0 || sequences == 0 || blocks == 0; }

    /// T, of the output [B, Hkv, T].
    std::int64_t longest() const { return rows == 0 ? 0 : capacity; }

    /// Of the inputs of a call; raises Refusal, naming the input, for shapes that do not fit. Allocates nothing else.
    static ScoreShape of(ScoreFields const& fields, nvinfer1::PluginTensorDesc const* inputs);

    /// The largest that an optimization profile allows; what is known of the shapes is checked in the same way.
    static ScoreShape largest(ScoreFields const& fields, nvinfer1::DynamicPluginTensorDesc const* inputs);

    /// Raises Refusal where there are more rows than the sequences may have: kernels would leave some out.
    void expect_positions(ScoreFields const& fields) const;

    /// Raises Refusal where the output's shape is another.
    void expect_output(ScoreFields const& fields, nvinfer1::Dims const& output) const;
};

/// Raises Refusal, naming the input, for one of another rank.
void expect_ranks(nvinfer1::DimsExprs const* inputs);

}  // namespace bpkv
