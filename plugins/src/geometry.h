#pragma once

#include <cstdint>

#include "number_type.h"

namespace bpkv {

/// What kernels are compiled for: a layer and its kernels must agree in all of it.
struct Geometry {
    std::int32_t query_heads = 0;
    std::int32_t kv_heads = 0;
    std::int32_t head_dim = 0;
    std::int32_t tokens_per_block = 0;
    std::int32_t top_k = 0;
    NumberType cache = NumberType::fp32;
    NumberType activations = NumberType::fp32;

    std::int32_t group() const { return query_heads / kv_heads; }
};

/// Raises Refusal with the first difference.
void expect_equal(Geometry const& kernels, Geometry const& layer);

}  // namespace bpkv
