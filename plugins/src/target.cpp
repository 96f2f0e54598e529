#include "target.h"

#include <tuple>

#include "text.h"

namespace bpkv {

bool Target::runs_on(Capability device) const {
    if (major != device.major) return false;
    // NVIDIA promises later minor versions for desktop devices only: on Tegra (8.7) the driver may refuse to load it.
    return exact ? minor == device.minor : minor <= device.minor;
}

std::optional<Target> parse_target(std::string_view text) {
    bool const exact = !text.empty() && text.back() == 'a';
    if (exact) text.remove_suffix(1);
    if (text.size() < 2 || text.size() > 3 || text.front() == '0') return std::nullopt;
    int number = 0;
    for (char const each : text) {
        if (each < '0' || each > '9') return std::nullopt;
        number = 10 * number + (each - '0');
    }
    return Target{number / 10, number % 10, exact};
}

std::string name_of(Target target) { return text(target.major, target.minor, target.exact ? "a" : ""); }

std::optional<std::size_t> choose_target(std::vector<Target> const& targets, Capability device) {
    auto const rank = [](Target target) { return std::tuple(target.exact, target.minor); };
    std::optional<std::size_t> best;
    for (std::size_t each = 0; each < targets.size(); ++each) {
        if (!targets[each].runs_on(device)) continue;
        if (!best || rank(targets[each]) > rank(targets[*best])) best = each;
    }
    return best;
}

}  // namespace bpkv
