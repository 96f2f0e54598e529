#pragma once

#include <cstddef>
#include <cstdint>

#include "score_fields.h"
#include "score_shape.h"

namespace bpkv {

/// Places of what kernels hand to each other, in bytes from the workspace's beginning; all fp32.
struct ScoreWorkspace {
    ScoreWorkspace(ScoreFields const& fields, ScoreShape const& shape, std::int32_t splits);

    std::size_t partials;      // [splits, S, Hq]
    std::size_t lse;           // [S, Hq]
    std::size_t context_read;  // [S, K, Hq]
    std::size_t bytes;         // of all
};

}  // namespace bpkv
