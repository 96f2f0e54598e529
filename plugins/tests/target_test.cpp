#include "target.h"

#include "check.h"

using namespace bpkv;

namespace {

std::string choice(std::vector<std::string> const& names, Capability device) {
    std::vector<Target> targets;
    for (auto const& name : names) targets.push_back(*parse_target(name));
    auto const chosen = choose_target(targets, device);
    return chosen ? names[*chosen] : "none";
}

}  // namespace

TEST(target, of_a_device_is_the_exact_one_or_the_latest_that_runs) {
    std::vector<std::string> const ours{"80", "86", "89", "90a", "100a", "120a"};
    struct Case {
        Capability device;
        char const* target;
    };
    for (auto const& [device, target] : std::vector<Case>{{{7, 5}, "none"},
                                                          {{8, 0}, "80"},
                                                          {{8, 6}, "86"},
                                                          {{8, 7}, "86"},
                                                          {{8, 9}, "89"},
                                                          {{9, 0}, "90a"},
                                                          {{10, 0}, "100a"},
                                                          {{10, 3}, "none"},
                                                          {{11, 0}, "none"},
                                                          {{12, 0}, "120a"},
                                                          {{12, 1}, "none"}}) {
        CHECK_EQUAL(choice(ours, device), target);
        CHECK_EQUAL(choice({ours.rbegin(), ours.rend()}, device), target);
    }
    CHECK_EQUAL(choice({"90", "90a"}, {9, 0}), "90a");
    CHECK_EQUAL(choice({"90a", "90"}, {9, 0}), "90a");
    CHECK_EQUAL(choice({"100", "100a"}, {10, 3}), "100");
    CHECK_EQUAL(choice({"103", "100", "101a"}, {10, 1}), "101a");
    CHECK_EQUAL(choice({"86"}, {8, 0}), "none");
}

TEST(target, has_one_name) {
    for (std::string const name : {"80", "86", "89", "90a", "100a", "120a", "75", "103"}) {
        CHECK_EQUAL(name_of(*parse_target(name)), name);
    }
    for (auto const* name : {"", "a", "8", "8a", "080", "90A", "90aa", "9x", "1000", "+90", "90f"}) {
        CHECK(!parse_target(name));
    }
}
