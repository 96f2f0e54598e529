// In a file of its own, so that nothing is inlined where memory is used, and a pair of `new` and `delete` split.

#include "counted_memory.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

constexpr long endless = -1;

std::atomic<long> count{0};
thread_local long left = endless;

}  // namespace

void* operator new(std::size_t size) {
    ++count;
    if (left == 0) throw std::bad_alloc();
    if (left > 0) --left;
    if (void* const memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }

void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace bpkv::test {

long allocations() { return count; }

OutOfMemory::OutOfMemory(long allocations_left) { left = allocations_left; }

OutOfMemory::~OutOfMemory() { left = endless; }

}  // namespace bpkv::test
