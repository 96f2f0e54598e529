#include <atomic>

#include "check.h"
#include "counted_memory.h"
#include "layer.h"
#include "stand_in.h"

using namespace bpkv;
using namespace bpkv::test;

namespace {

/// Only counts, since keeping lines takes memory.
struct Counter final : nvinfer1::ILogger {
    void log(Severity, char const*) noexcept override { ++lines; }
    std::atomic<int> lines{0};
};

}  // namespace

TEST(memory, is_not_allocated_by_a_second_enqueue) {
    StandIn const stand_in;
    auto const fields = small_fields();
    Creator creator;
    auto const plugin = creator.make(field_list(fields, bundle_for(fields, {"90a"}).bytes()));
    Memory const memory;
    for (int round = 0; round < 5; ++round) {
        Step const step{4 + round, 2, 7 + round, 2};
        auto const descs = descs_of(fields, step);
        auto const output = runtime_of(*plugin).onShapeChange(descs.data(), input_count, descs.data() + input_count, 1);
        auto& runtime = runtime_of(*plugin);
        // What the stand-in itself allocates is counted as well: nothing, once its counters are there.
        auto const before = allocations();
        auto const error = runtime.enqueue(descs.data(), descs.data() + input_count, memory.inputs.data(),
                                           memory.outputs.data(), memory.workspace, nullptr);
        auto const during = allocations() - before;
        CHECK_EQUAL(output, 0);
        CHECK_EQUAL(error, 0);
        CHECK(round == 0 ? during > 0 : during == 0);
    }
}

TEST(memory, that_runs_out_anywhere_is_told_and_nothing_leaks_out) {
    StandIn const stand_in;
    auto const fields = small_fields();
    auto const kernels = bundle_for(fields, {"90a"}).bytes();
    auto list = field_list(fields, kernels);
    auto const* const collection = list.collection();
    auto const descs = descs_of(fields, {});
    auto const profile = profile_of(fields, {});
    Memory const memory;
    int refusals = 0;
    bool done = false;
    for (long count = 0; !done; ++count) {
        Counter counter;
        ScoreCreator creator;
        creator.log().use(&counter);
        std::unique_ptr<nvinfer1::IPluginV3> plugin, clone;
        std::int32_t errors = 0;
        {
            OutOfMemory const from(count);
            plugin.reset(creator.createPlugin("", collection, nvinfer1::TensorRTPhase::kRUNTIME));
            if (plugin != nullptr) clone.reset(plugin->clone());
            if (clone != nullptr) {
                auto& build = build_of(*clone);
                auto& runtime = runtime_of(*clone);
                errors += build.configurePlugin(profile.data(), input_count, profile.data() + input_count, 1) != 0;
                errors += runtime.enqueue(descs.data(), descs.data() + input_count, memory.inputs.data(),
                                          memory.outputs.data(), memory.workspace, nullptr) != 0;
            }
        }
        done = clone != nullptr && errors == 0;
        refusals += !done;
        CHECK_EQUAL(counter.lines.load(), done ? 0 : plugin == nullptr || clone == nullptr ? 1 : errors);
        // Whatever failed for want of memory works once there is some.
        if (clone != nullptr) CHECK_EQUAL(enqueue(*clone, fields, {}), 0);
        clone.reset();
        plugin.reset();
        CHECK_EQUAL(stand_in.live(), 0);
    }
    CHECK(refusals > 50);
}
