#pragma once

#include <cstdint>
#include <string_view>

namespace bpkv {

/// FNV-1a, 64 bits, as a field can hold it.
inline std::int64_t checksum_of(std::string_view bytes) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (char const each : bytes) hash = (hash ^ static_cast<unsigned char>(each)) * 0x100000001b3;
    return static_cast<std::int64_t>(hash);
}

}  // namespace bpkv
