#include "log.h"

#include "captured_log.h"
#include "check.h"

using namespace bpkv;
using namespace bpkv::test;

namespace {

struct Finder final : nvinfer1::ILoggerFinder {
    nvinfer1::ILogger* findLogger() override {
        if (throws) throw 1;
        return found;
    }
    nvinfer1::ILogger* found = nullptr;
    bool throws = false;
};

}  // namespace

TEST(log, lines_go_to_the_logger_that_is_found_else_to_the_one_given) {
    Log log;
    CapturedLog given, found;
    Finder finder;
    log.use(&given);
    log.error("here", "one");
    CHECK((given.take() == std::vector<std::string>{"bpkv: here: one"}));
    log.use(&finder);
    log.error("here", "two");
    CHECK((given.take() == std::vector<std::string>{"bpkv: here: two"}));
    finder.found = &found;
    log.error("here", "three");
    CHECK((found.take() == std::vector<std::string>{"bpkv: here: three"}));
    finder.throws = true;
    log.error("here", "four");
    CHECK((given.take() == std::vector<std::string>{"bpkv: here: four"}));
}

TEST(log, lines_are_one_printable_line_of_bounded_length) {
    Log log;
    CapturedLog given;
    log.use(&given);
    log.error("a\nb", std::string("c\0d\x1b\xff", 5));
    CHECK((given.take() == std::vector<std::string>{"bpkv: a?b: c?d??"}));
    log.error("x", std::string(5000, 'y'));
    auto const lines = given.take();
    CHECK_EQUAL(lines[0], "bpkv: x: " + std::string(1000 - 9, 'y'));
}

TEST(log, tells_what_was_thrown) {
    Log log;
    CapturedLog given;
    log.use(&given);
    CHECK_EQUAL(guarded(log, "w", -1, [] { return 5; }), 5);
    CHECK_EQUAL(guarded(log, "w", -1, []() -> int { throw std::bad_alloc(); }), -1);
    CHECK(given.told("out of memory"));
    CHECK_EQUAL(guarded(log, "w", -1, []() -> int { throw std::runtime_error("why"); }), -1);
    CHECK(given.told("w: why"));
    CHECK_EQUAL(guarded(log, "w", -1, []() -> int { throw 3; }), -1);
    CHECK(given.told("unknown"));
}
