// Runs the tests of the groups that are named, or all.

#include <algorithm>
#include <exception>
#include <iostream>

#include "check.h"

int main(int count, char** names) {
    using namespace bpkv::test;
    int ran = 0;
    for (auto const& test : tests()) {
        bool const named = std::any_of(names + 1, names + count, [&](auto const* name) { return test.group == name; });
        if (count > 1 && !named) continue;
        auto const before = failures.count;
        try {
            test.body();
        } catch (std::exception const& error) {
            ++failures.count;
            std::cerr << error.what() << "\n";
        }
        std::cout << (failures.count == before ? "ok      " : "FAILED  ") << test.group << " " << test.name << "\n";
        ++ran;
    }
    std::cout << ran << " tests, " << failures.count << " failed checks\n";
    return ran == 0 || failures.count > 0;
}
