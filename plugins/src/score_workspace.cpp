#include "score_workspace.h"

namespace bpkv {

namespace {

constexpr std::size_t alignment = 256;

std::size_t after(std::size_t begin, std::int64_t numbers) {
    auto const end = begin + static_cast<std::size_t>(numbers) * sizeof(float);
    return (end + alignment - 1) / alignment * alignment;
}

}  // namespace

ScoreWorkspace::ScoreWorkspace(ScoreFields const& fields, ScoreShape const& shape, std::int32_t splits) {
    auto const pairs = shape.rows * fields.query_heads;
    partials = 0;
    lse = after(partials, splits * pairs);
    context_read = after(lse, pairs);
    bytes = after(context_read, pairs * fields.top_k);
}

}  // namespace bpkv
