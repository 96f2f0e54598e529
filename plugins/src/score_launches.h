#pragma once

#include <array>
#include <cstdint>

#include "kernel_bundle.h"
#include "score_fields.h"
#include "score_shape.h"

namespace bpkv {

struct Grid {
    std::uint32_t x = 1;
    std::uint32_t y = 1;
    std::uint32_t z = 1;
};

struct Launch {
    ScoreKernel kernel;
    std::int32_t block;  // of positions, which chooses the kernel's variant; 0 for a kernel without
    Grid grid;
};

/// The kernels that score one layer, in order, as bpkv_trt/kernels/lse.py and score.py launch them.
struct ScoreLaunches {
    ScoreLaunches(ScoreFields const& fields, ScoreShape const& shape, TargetKernels const& kernels,
                  std::int32_t rows_per_split);

    std::int32_t blocks;  // of positions
    std::int32_t splits;  // of the cache, whose log-sum-exp are combined
    std::array<Launch, 4> list;
};

/// How many parts the cache is cut into, so that there are programs enough.
std::int32_t splits_of(std::int64_t capacity, std::int32_t rows_per_split, std::int32_t most_splits);

}  // namespace bpkv
