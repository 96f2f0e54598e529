#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bpkv {

/// Compute capability of a device.
struct Capability {
    int major;
    int minor;
};

/// What a kernel is compiled for: "86" for 8.6 and later 8.x, "90a" for 9.0 alone.
struct Target {
    int major;
    int minor;
    bool exact;

    bool runs_on(Capability device) const;
};

inline bool operator==(Target a, Target b) { return a.major == b.major && a.minor == b.minor && a.exact == b.exact; }

std::optional<Target> parse_target(std::string_view text);
std::string name_of(Target target);

/// The place of the best target for a device: the exact one, else the latest that runs there.
std::optional<std::size_t> choose_target(std::vector<Target> const& targets, Capability device);

}  // namespace bpkv
