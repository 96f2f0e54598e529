#pragma once

#include <string>
#include <string_view>

namespace bpkv {

namespace detail {

inline void append(std::string& line, std::string_view part) { line += part; }
inline void append(std::string& line, long long part) { line += std::to_string(part); }
inline void append(std::string& line, long part) { line += std::to_string(part); }
inline void append(std::string& line, int part) { line += std::to_string(part); }
inline void append(std::string& line, unsigned long part) { line += std::to_string(part); }
inline void append(std::string& line, unsigned part) { line += std::to_string(part); }

}  // namespace detail

/// Pieces of text and whole numbers, one after the other.
template <typename... Parts>
std::string text(Parts const&... parts) {
    std::string line;
    (detail::append(line, parts), ...);
    return line;
}

}  // namespace bpkv
