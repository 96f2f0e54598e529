#pragma once

namespace bpkv::test {

/// How often `operator new` was called in this process.
long allocations();

/// As long as it lives, all allocations of this thread fail after so many more.
struct OutOfMemory {
    explicit OutOfMemory(long allocations_left);
    ~OutOfMemory();
    OutOfMemory(OutOfMemory const&) = delete;
    OutOfMemory& operator=(OutOfMemory const&) = delete;
};

}  // namespace bpkv::test
