#pragma once

#include <array>
#include <optional>
#include <string_view>

namespace bpkv {

/// What the cache is made of, or the activations (the first three).
enum class NumberType { fp32, fp16, bf16, fp8e4m3, int8 };

inline constexpr std::array<char const*, 5> number_type_names{"fp32", "fp16", "bf16", "fp8e4m3", "int8"};
inline constexpr int activation_types = 3;

constexpr char const* name_of(NumberType type) { return number_type_names[static_cast<std::size_t>(type)]; }

/// The type of that name among the first `choices`.
constexpr std::optional<NumberType> number_type(std::string_view name, int choices) {
    for (int each = 0; each < choices; ++each) {
        auto const type = static_cast<NumberType>(each);
        if (name == name_of(type)) return type;
    }
    return std::nullopt;
}

}  // namespace bpkv
