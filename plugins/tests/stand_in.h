#pragma once

extern "C" {
using StandInLaunch = int (*)(void const* image, char const* kernel, int device, unsigned grid[3], unsigned threads,
                              unsigned shared_bytes, void* stream, void** arguments);
void stand_in_set_device(int ordinal);
void stand_in_set_capability(int ordinal, int major, int minor);
void stand_in_set_launch(StandInLaunch on_launch);
void stand_in_fail(char const* function, int result);
int stand_in_count(char const* what);
void stand_in_reset();
}

namespace bpkv::test {

/// The stand-in as at its beginning, and again when the test ends.
class StandIn {
public:
    StandIn() { stand_in_reset(); }
    ~StandIn() { stand_in_reset(); }
    StandIn(StandIn const&) = delete;
    StandIn& operator=(StandIn const&) = delete;

    /// Libraries that were loaded since, and not unloaded.
    int live() const { return stand_in_count("live") - live_before_; }

private:
    int const live_before_ = stand_in_count("live");
};

}  // namespace bpkv::test
