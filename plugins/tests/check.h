#pragma once

#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace bpkv::test {

struct Test {
    std::string group;
    std::string name;
    std::function<void()> body;
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Failures {
    int count = 0;
};
inline Failures failures;

struct Registered {
    Registered(char const* group, char const* name, std::function<void()> body) {
        tests().push_back({group, name, body});
    }
};

inline void check(bool holds, std::string const& what, char const* file, int line) {
    if (holds) return;
    ++failures.count;
    std::cerr << file << ":" << line << ": " << what << "\n";
}

template <typename A, typename B>
void check_equal(A const& a, B const& b, char const* what, char const* file, int line) {
    if (a == b) return;
    ++failures.count;
    std::cerr << file << ":" << line << ": " << what << ": " << a << " and " << b << "\n";
}

}  // namespace bpkv::test

#define TEST(group, name)                                                                     \
    static void group##_##name();                                                             \
    static bpkv::test::Registered const group##_##name##_test(#group, #name, group##_##name); \
    static void group##_##name()
#define CHECK(...) bpkv::test::check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
#define CHECK_EQUAL(a, b) bpkv::test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
