#pragma once

#include <cstdint>
#include <string_view>

#include "refusal.h"

namespace bpkv {

/// Goes through the bytes of a bundle; raises Refusal rather than read past their end.
class BundleReader {
public:
    explicit BundleReader(std::string_view bytes) : bytes_(bytes) {}

    std::string_view bytes(std::uint64_t count) {
        if (count > bytes_.size() - place_) {
            throw Refusal("the kernels end at byte ", bytes_.size(), " within a record; ", advice);
        }
        auto const result = bytes_.substr(place_, count);
        place_ += count;
        return result;
    }

    std::uint32_t u32() { return static_cast<std::uint32_t>(little_endian(4)); }
    std::uint64_t u64() { return little_endian(8); }
    std::string_view name() { return bytes(u32()); }

    /// To the next multiple of `unit` bytes from the beginning, over zeros.
    void align(std::size_t unit) {
        if (bytes((unit - place_ % unit) % unit).find_first_not_of('\0') != std::string_view::npos) {
            throw Refusal("the kernels have padding that is not zero; ", advice);
        }
    }

    void expect_end() const {
        if (place_ != bytes_.size()) {
            throw Refusal("the kernels have ", bytes_.size() - place_, " bytes after the last record; ", advice);
        }
    }

    static constexpr char const* advice = "give a bundle as bpkv_trt writes it, of this release.";

private:
    std::uint64_t little_endian(int count) {
        std::uint64_t value = 0;
        auto const given = bytes(count);
        for (int each = count - 1; each >= 0; --each) value = value << 8 | static_cast<unsigned char>(given[each]);
        return value;
    }

    std::string_view bytes_;
    std::size_t place_ = 0;
};

}  // namespace bpkv
