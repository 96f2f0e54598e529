#include "score_shape.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "refusal.h"
#include "score_tensors.h"

namespace bpkv {

using nvinfer1::Dims;

namespace {

constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t most_of_grid = 65535;       // of its second and third dimension
constexpr std::int64_t most_capacity = 1LL << 30;  // kernels add a tile, and subtract a window, in int32
constexpr std::int64_t unknown = -1;

enum Axis { rows, sequences, sequences_and_1, blocks, pools, query_heads, head_dim, top_k, two, axis_count };
constexpr std::array<char const*, axis_count> axis_names{"S", "B", "B + 1", "P", "pools", "Hq", "D", "K", "2"};

struct Layout {
    std::int32_t rank;
    std::array<Axis, 4> axes;
};
constexpr std::array<Layout, input_count> layouts{{
    {3, {rows, query_heads, head_dim}},
    {3, {rows, query_heads, head_dim}},
    {4, {rows, top_k, query_heads, head_dim}},
    {2, {rows, top_k}},
    {1, {rows}},
    {1, {sequences_and_1}},
    {4, {pools, sequences, two, blocks}},
    {1, {sequences}},
    {2, {pools, two}},
}};

std::string shape_of(Dims const& dims) {
    std::string line = "[";
    for (std::int32_t each = 0; each < std::clamp(dims.nbDims, 0, Dims::MAX_DIMS); ++each) {
        line += text(each ? ", " : "", dims.d[each]);
    }
    return line + "]";
}

/// Extents as they become known: some by the fields, others by the first input that has them.
class Extents {
public:
    explicit Extents(ScoreFields const& fields) {
        known_.fill(unknown);
        known_[query_heads] = fields.query_heads;
        known_[head_dim] = fields.head_dim;
        known_[top_k] = fields.top_k;
        known_[two] = 2;
    }

    /// Raises Refusal unless an input's shape fits to what is known.
    void agree(std::int32_t input, Dims const& dims, bool may_be_open = false) {
        expect_rank(input, dims);
        auto const& layout = layouts[input];
        for (std::int32_t each = 0; each < layout.rank; ++each) {
            auto const given = dims.d[each];
            if (given == unknown && may_be_open) continue;
            if (!learn(layout.axes[each], given)) throw misfit(input, dims);
        }
    }

    /// As `agree`, but free extents may differ between inputs, as bounds do: the largest counts.
    void widen(std::int32_t input, Dims const& dims) {
        expect_rank(input, dims);
        auto const& layout = layouts[input];
        for (std::int32_t each = 0; each < layout.rank; ++each) {
            auto const axis = layout.axes[each];
            auto& known = known_of(axis);
            if (is_fixed(axis) && dims.d[each] < known) throw misfit(input, dims);
            if (!is_fixed(axis)) known = std::max(known, extent_of(axis, dims.d[each]));
        }
    }

    /// Raises Refusal where a fixed extent is below the least that a profile allows.
    void expect_least(std::int32_t input, Dims const& dims) const {
        expect_rank(input, dims);
        auto const& layout = layouts[input];
        for (std::int32_t each = 0; each < layout.rank; ++each) {
            if (is_fixed(layout.axes[each]) && dims.d[each] > known_[layout.axes[each]]) throw misfit(input, dims);
        }
    }

    std::int64_t operator[](Axis axis) const { return std::max<std::int64_t>(known_[axis], 0); }

private:
    static bool is_fixed(Axis axis) { return axis >= query_heads; }

    /// One input has a number more than there are sequences.
    static std::int64_t extent_of(Axis axis, std::int64_t given) {
        return axis == sequences_and_1 ? std::max<std::int64_t>(given, 0) - 1 : given;
    }
    std::int64_t& known_of(Axis axis) { return known_[axis == sequences_and_1 ? sequences : axis]; }

    bool learn(Axis axis, std::int64_t given) {
        auto const extent = extent_of(axis, given);
        auto& known = known_of(axis);
        if (known == unknown) known = extent;
        return extent >= 0 && extent == known;
    }

    void expect_rank(std::int32_t input, Dims const& dims) const {
        if (dims.nbDims != layouts[input].rank) throw misfit(input, dims);
    }

    Refusal misfit(std::int32_t input, Dims const& dims) const {
        std::string symbols, numbers;
        for (std::int32_t each = 0; each < layouts[input].rank; ++each) {
            auto const axis = layouts[input].axes[each];
            auto const extent =
                axis == sequences_and_1 ? (known_[sequences] < 0 ? unknown : known_[sequences] + 1) : known_[axis];
            symbols += text(each ? ", " : "", axis_names[axis]);
            numbers += text(each ? ", " : "", extent == unknown ? "any" : text(extent));
        }
        return Refusal("input ", input, " (", input_names[input], ") has shape ", shape_of(dims), "; expected [",
                       symbols, "], here [", numbers,
                       "]: give all inputs of one step, of the model that the fields name.");
    }

    std::array<std::int64_t, axis_count> known_;
};

void expect_most(std::int64_t value, std::int64_t limit, char const* what, char const* advice) {
    if (value > limit) throw Refusal(what, " is ", value, ", at most ", limit, " can be; ", advice, ".");
}

/// Raises Refusal for what kernels cannot count or a grid cannot hold.
ScoreShape within_limits(ScoreFields const& fields, Extents const& extents) {
    auto const few_sequences = "give fewer sequences at once", short_table = "give shorter block tables";
    if (fields.pool >= extents[pools]) {
        throw Refusal("input ", int{input_pool_addresses}, " (", input_names[input_pool_addresses], ") has ",
                      extents[pools], " pools and the layer is in pool ", fields.pool, "; give all pools' addresses.");
    }
    expect_most(extents[rows], most_of_grid, "the number of scoring rows, dimension 0 of q,", few_sequences);
    expect_most(extents[sequences], most_of_grid, "the number of sequences, of lengths,", few_sequences);
    expect_most(extents[blocks], most_capacity, "the number of blocks, of block_offsets,", short_table);
    auto const capacity = extents[blocks] * fields.tokens_per_block;
    expect_most(capacity, most_capacity, "the rows that block_offsets' blocks hold", short_table);
    expect_most(2 * extents[blocks] * extents[sequences], most, "the size of block_offsets of one pool", short_table);
    expect_most(extents[rows] * fields.query_heads, most, "scoring rows times query heads", few_sequences);
    // Row by row, since the product of all four could pass 64 bits.
    auto const of_row = std::int64_t{fields.query_heads} * fields.top_k;
    expect_most(of_row, most / fields.head_dim, "top_k times query heads", "compile kernels for fewer of one");
    expect_most(std::min<std::int64_t>(fields.positions, extents[rows]), most / (of_row * fields.head_dim),
                "the number of scoring rows of one sequence", "give fewer positions");
    return {extents[rows], extents[sequences], extents[blocks], capacity};
}

}  // namespace

ScoreShape ScoreShape::of(ScoreFields const& fields, nvinfer1::PluginTensorDesc const* inputs) {
    Extents extents(fields);
    for (std::int32_t each = 0; each < input_count; ++each) extents.agree(each, inputs[each].dims);
    return within_limits(fields, extents);
}

ScoreShape ScoreShape::largest(ScoreFields const& fields, nvinfer1::DynamicPluginTensorDesc const* inputs) {
    Extents known(fields), bounds(fields);
    for (std::int32_t each = 0; each < input_count; ++each) {
        known.agree(each, inputs[each].desc.dims, true);
        bounds.expect_least(each, inputs[each].min);
        bounds.widen(each, inputs[each].max);
    }
    return within_limits(fields, bounds);
}

void ScoreShape::expect_positions(ScoreFields const& fields) const {
    if (rows <= sequences * fields.positions) return;
    throw Refusal("input ", int{input_q}, " (", input_names[input_q], ") has ", rows, " rows of ", sequences,
                  " sequences, each at most ", fields.positions,
                  "; score fewer positions, or compile kernels for more.");
}

void ScoreShape::expect_output(ScoreFields const& fields, Dims const& output) const {
    if (output.nbDims == 3 && output.d[0] == sequences && output.d[1] == fields.kv_heads && output.d[2] == longest()) {
        return;
    }
    throw Refusal("the output (scores) has shape ", shape_of(output), "; expected [B, Hkv, T], here [", sequences, ", ",
                  fields.kv_heads, ", ", longest(), "]: build plugin and engine from one release.");
}

void expect_ranks(nvinfer1::DimsExprs const* inputs) {
    for (std::int32_t each = 0; each < input_count; ++each) {
        if (inputs[each].nbDims == layouts[each].rank) continue;
        throw Refusal("input ", each, " (", input_names[each], ") has ", inputs[each].nbDims, " dimensions; expected ",
                      layouts[each].rank, ".");
    }
}

}  // namespace bpkv
