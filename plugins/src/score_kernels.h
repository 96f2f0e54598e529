#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "number_type.h"

namespace bpkv {

/// The kernels of scoring, in the order of their launches.
enum class ScoreKernel { partial_log_sum_exp, combined_log_sum_exp, read_context, score_entries };

inline constexpr std::array<char const*, 4> score_kernel_names{"partial_log_sum_exp", "combined_log_sum_exp",
                                                               "read_context", "score_entries"};

constexpr char const* name_of(ScoreKernel kernel) { return score_kernel_names[static_cast<std::size_t>(kernel)]; }

/// These two come once for every BLOCK, the number of positions that they take at a time.
constexpr bool has_blocks(ScoreKernel kernel) {
    return kernel == ScoreKernel::partial_log_sum_exp || kernel == ScoreKernel::score_entries;
}

std::optional<ScoreKernel> score_kernel(std::string_view name);

/// What kernels are given. `lse` and `context_read` are written by kernels that call them `result`.
enum class Argument {
    q,
    context,
    readout,
    p,
    weights,
    offsets,
    addresses,
    key_pages,
    value_pages,
    lengths,
    partials,
    lse,
    context_read,
    scores,
    rows,
    columns,
    blocks,
    splits,
    sequence_stride,
    head_stride,
    length_sequence_stride,
    length_head_stride,
    first_page,
    window,
    longest,
    scale,
    value_scale,
};
inline constexpr std::size_t argument_count = static_cast<std::size_t>(Argument::value_scale) + 1;

/// Whether its type is that of the activations.
constexpr bool is_activation(Argument argument) { return argument <= Argument::readout; }

/// Triton's name of the type of an argument that is no activation, such as "*fp32".
char const* type_of(Argument argument);

/// What a kernel calls so; none if it has no such argument.
std::optional<Argument> argument_of(ScoreKernel kernel, std::string_view name);

/// How many a kernel has.
std::size_t arguments_of(ScoreKernel kernel);

}  // namespace bpkv
