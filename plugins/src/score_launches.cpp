#include "score_launches.h"

#include <algorithm>

namespace bpkv {

namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The smallest that holds all positions of an average sequence, else the largest: only speed depends on it.
std::int32_t choose_block(std::vector<std::int32_t> const& ascending, std::int64_t positions) {
    auto const found = std::find_if(ascending.begin(), ascending.end(), [&](auto each) { return each >= positions; });
    return found == ascending.end() ? ascending.back() : *found;
}

Grid grid(std::int64_t x, std::int64_t y, std::int64_t z) {
    return {static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(y), static_cast<std::uint32_t>(z)};
}

}  // namespace

std::int32_t splits_of(std::int64_t capacity, std::int32_t rows_per_split, std::int32_t most_splits) {
    auto const wanted = ceil_div(capacity, rows_per_split);
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(wanted, 1, most_splits));
}

ScoreLaunches::ScoreLaunches(ScoreFields const& fields, ScoreShape const& shape, TargetKernels const& kernels,
                             std::int32_t rows_per_split) {
    auto const block = choose_block(kernels.blocks, ceil_div(shape.rows, shape.sequences));
    auto const& combined = kernels.get(ScoreKernel::combined_log_sum_exp, 0);
    auto const& context = kernels.get(ScoreKernel::read_context, 0);
    auto const& entries = kernels.get(ScoreKernel::score_entries, block);
    auto const most_positions = std::min<std::int64_t>(fields.positions, shape.rows);
    blocks = static_cast<std::int32_t>(ceil_div(most_positions, block));
    splits = splits_of(shape.capacity, rows_per_split, combined.splits);
    auto const columns = shape.rows * fields.query_heads;
    auto const pairs = std::int64_t{fields.top_k} * fields.query_heads;
    list = {{
        {ScoreKernel::partial_log_sum_exp, block,
         grid(std::int64_t{blocks} * splits, fields.kv_heads, shape.sequences)},
        {ScoreKernel::combined_log_sum_exp, 0, grid(ceil_div(columns, combined.columns), 1, 1)},
        {ScoreKernel::read_context, 0, grid(ceil_div(pairs, context.tile), shape.rows, 1)},
        {ScoreKernel::score_entries, block,
         grid(ceil_div(shape.longest(), entries.tile), fields.kv_heads, shape.sequences)},
    }};
}

}  // namespace bpkv
