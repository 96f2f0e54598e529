#include <cstdlib>
#include <dlfcn.h>

#include "check.h"
#include "layer.h"
#include "stand_in.h"

using namespace bpkv;
using namespace bpkv::test;

namespace {

std::string events() {
    void* const profiler = dlopen(std::getenv("NVTX_INJECTION64_PATH"), RTLD_NOW);
    if (profiler == nullptr) throw std::runtime_error(dlerror());
    return reinterpret_cast<char const* (*)()>(dlsym(profiler, "stand_in_nvtx_events"))();
}

}  // namespace

TEST(nvtx, has_one_range_for_every_call_that_scores) {
    StandIn const stand_in;
    auto const fields = small_fields();
    Creator creator;
    auto const plugin = creator.make(field_list(fields, bundle_for(fields, {"90a"}).bytes()));
    std::unique_ptr<nvinfer1::IPluginV3> const clone(plugin->clone());
    CHECK_EQUAL(enqueue(*plugin, fields, {5, 2, 7, 2}), 0);
    CHECK_EQUAL(enqueue(*clone, fields, {1, 1, 7, 2}), 0);
    CHECK_EQUAL(enqueue(*clone, fields, {0, 1, 7, 2}), 0);
    stand_in_fail("cuLaunchKernel", 1);
    CHECK(enqueue(*plugin, fields, {3, 1, 7, 2}) != 0);
    CHECK_EQUAL(events(),
                "create bpkv\nbpkv push score 5\nbpkv pop\nbpkv push score 1\nbpkv pop\nbpkv push score 3\nbpkv pop\n");
}
