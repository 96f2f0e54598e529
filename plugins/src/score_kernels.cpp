#include "score_kernels.h"

#include <utility>

namespace bpkv {

namespace {

using Name = std::pair<std::string_view, Argument>;

// As in bpkv_trt/kernels/lse.py and score.py; their order there is that of the bundle.
constexpr std::array partial_log_sum_exp{
    Name{"q", Argument::q},
    Name{"offsets", Argument::offsets},
    Name{"addresses", Argument::addresses},
    Name{"key_pages", Argument::key_pages},
    Name{"lengths", Argument::lengths},
    Name{"rows", Argument::rows},
    Name{"blocks", Argument::blocks},
    Name{"sequence_stride", Argument::sequence_stride},
    Name{"head_stride", Argument::head_stride},
    Name{"length_sequence_stride", Argument::length_sequence_stride},
    Name{"length_head_stride", Argument::length_head_stride},
    Name{"first_page", Argument::first_page},
    Name{"window", Argument::window},
    Name{"scale", Argument::scale},
    Name{"partials", Argument::partials},
};
constexpr std::array combined_log_sum_exp{
    Name{"partials", Argument::partials},
    Name{"splits", Argument::splits},
    Name{"columns", Argument::columns},
    Name{"result", Argument::lse},
};
constexpr std::array read_context{
    Name{"context", Argument::context},
    Name{"readout", Argument::readout},
    Name{"result", Argument::context_read},
};
constexpr std::array score_entries{
    Name{"q", Argument::q},
    Name{"readout", Argument::readout},
    Name{"context_read", Argument::context_read},
    Name{"p", Argument::p},
    Name{"weights", Argument::weights},
    Name{"offsets", Argument::offsets},
    Name{"addresses", Argument::addresses},
    Name{"key_pages", Argument::key_pages},
    Name{"value_pages", Argument::value_pages},
    Name{"lengths", Argument::lengths},
    Name{"lse", Argument::lse},
    Name{"sequence_stride", Argument::sequence_stride},
    Name{"head_stride", Argument::head_stride},
    Name{"length_sequence_stride", Argument::length_sequence_stride},
    Name{"length_head_stride", Argument::length_head_stride},
    Name{"first_page", Argument::first_page},
    Name{"window", Argument::window},
    Name{"longest", Argument::longest},
    Name{"scale", Argument::scale},
    Name{"value_scale", Argument::value_scale},
    Name{"scores", Argument::scores},
};

template <typename Action>
auto with_names(ScoreKernel kernel, Action const& action) {
    switch (kernel) {
        case ScoreKernel::partial_log_sum_exp: return action(partial_log_sum_exp);
        case ScoreKernel::combined_log_sum_exp: return action(combined_log_sum_exp);
        case ScoreKernel::read_context: return action(read_context);
        default: return action(score_entries);
    }
}

}  // namespace

std::optional<ScoreKernel> score_kernel(std::string_view name) {
    for (std::size_t each = 0; each < score_kernel_names.size(); ++each) {
        if (name == score_kernel_names[each]) return static_cast<ScoreKernel>(each);
    }
    return std::nullopt;
}

char const* type_of(Argument argument) {
    switch (argument) {
        case Argument::offsets:
        case Argument::key_pages:
        case Argument::value_pages:
        case Argument::lengths: return "*i32";
        case Argument::addresses: return "*i64";
        case Argument::scale:
        case Argument::value_scale: return "fp32";
        default: return argument <= Argument::scores ? "*fp32" : "i32";
    }
}

std::optional<Argument> argument_of(ScoreKernel kernel, std::string_view name) {
    return with_names(kernel, [&](auto const& names) -> std::optional<Argument> {
        for (auto const& [known, argument] : names) {
            if (known == name) return argument;
        }
        return std::nullopt;
    });
}

std::size_t arguments_of(ScoreKernel kernel) {
    return with_names(kernel, [](auto const& names) { return names.size(); });
}

}  // namespace bpkv
