#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "layer.h"
#include "stand_in.h"
#include "text.h"

using namespace bpkv;
using namespace bpkv::test;

namespace {

constexpr int kernels_of_a_target = 8;     // 2 with 3 blocks each, and 2 without
constexpr int attributes_of_a_target = 3;  // those above 48 KiB

std::string kernels_for(std::vector<std::string> const& targets = {"86", "90a"}) {
    return bundle_for(small_fields(), targets).bytes();
}

ScoreFields naming(std::string const& kernels, std::int32_t layer = 0) {
    auto fields = small_fields();
    fields.layer_in_pool = layer;
    fields.kernels_checksum = checksum_of(kernels);
    return fields;
}

using Plugin = std::unique_ptr<nvinfer1::IPluginV3>;

}  // namespace

TEST(life, clones_and_layers_of_one_checksum_load_kernels_once) {
    StandIn const stand_in;
    auto const kernels = kernels_for();
    Creator creator;
    auto const before = creator.make(field_list(naming(kernels, 0)));  // ahead of its carrier
    auto const carrier = creator.make(field_list(naming(kernels, 1), kernels));
    auto const again = creator.make(field_list(naming(kernels, 2), kernels));
    auto const after = creator.make(field_list(naming(kernels, 3)));
    Plugin const clone(before->clone());
    Plugin const attached(runtime_of(*clone).attachToContext(nullptr));
    CHECK_EQUAL(stand_in_count("loads"), 0);
    for (auto const* plugin : {&before, &carrier, &again, &after, &clone, &attached}) {
        CHECK_EQUAL(enqueue(**plugin, small_fields(), {}), 0);
    }
    CHECK_EQUAL(stand_in_count("loads"), kernels_of_a_target);
    CHECK_EQUAL(stand_in_count("functions"), kernels_of_a_target);
    CHECK_EQUAL(stand_in_count("attributes"), attributes_of_a_target);
    CHECK_EQUAL(stand_in_count("launches"), 6 * 4);
    CHECK_EQUAL(creator.log.take().size(), 0U);
}

TEST(life, what_comes_from_a_carrier_carries_the_kernels_too) {
    auto const kernels = kernels_for();
    Creator creator;
    auto const carried = [](nvinfer1::IPluginV3& plugin) -> std::string {
        auto const* const fields = runtime_of(plugin).getFieldsToSerialize();
        for (int each = 0; each < fields->nbFields; ++each) {
            auto const& field = fields->fields[each];
            if (std::strcmp(field.name, "kernels") != 0) continue;
            return {static_cast<char const*>(field.data), static_cast<std::size_t>(field.length)};
        }
        return "";
    };
    auto const carrier = creator.make(field_list(naming(kernels, 0), kernels));
    auto const other = creator.make(field_list(naming(kernels, 1)));
    for (auto const* plugin : {&carrier, &other}) {
        Plugin const clone((*plugin)->clone()), attached(runtime_of(**plugin).attachToContext(nullptr));
        for (auto const* each : {plugin, &clone, &attached}) {
            CHECK(carried(**each) == (plugin == &carrier ? kernels : ""));
        }
    }
}

TEST(life, ends_in_any_order) {
    std::mt19937 random(4);
    auto const kernels = kernels_for();
    for (int round = 0; round < 300; ++round) {
        StandIn const stand_in;
        auto creator = std::make_unique<Creator>();
        std::vector<Plugin> plugins;
        auto const carriers = 1 + random() % 2;
        for (unsigned layer = 0; layer < 5; ++layer) {
            bool const carries = layer < carriers;
            plugins.push_back(
                creator->make(carries ? field_list(naming(kernels), kernels) : field_list(naming(kernels))));
        }
        for (int copies = 0; copies < 3; ++copies) plugins.emplace_back(plugins[random() % plugins.size()]->clone());
        std::shuffle(plugins.begin(), plugins.end(), random);
        bool const early = random() % 2 == 0;
        if (early) CHECK_EQUAL(enqueue(*plugins[random() % plugins.size()], small_fields(), {}), 0);
        while (plugins.size() > 1) {
            plugins.pop_back();
            CHECK_EQUAL(enqueue(*plugins[random() % plugins.size()], small_fields(), {}), 0);
            CHECK_EQUAL(stand_in.live(), kernels_of_a_target);
        }
        CHECK_EQUAL(creator->log.take().size(), 0U);
        if (random() % 2 == 0) creator.reset();  // as when a process ends
        CHECK_EQUAL(enqueue(*plugins[0], small_fields(), {}), 0);
        plugins.clear();
        CHECK_EQUAL(stand_in.live(), 0);
        CHECK_EQUAL(stand_in_count("loads"), kernels_of_a_target);
        CHECK_EQUAL(stand_in_count("unloads"), kernels_of_a_target);
    }
}

TEST(life, after_the_last_layer_kernels_have_to_be_carried_anew) {
    StandIn const stand_in;
    auto const kernels = kernels_for();
    Creator creator;
    creator.make(field_list(naming(kernels), kernels)).reset();
    auto const plugin = creator.make(field_list(naming(kernels)));
    CHECK(enqueue(*plugin, small_fields(), {}) != 0);
    CHECK(creator.log.told("no layer carries", text(checksum_of(kernels))));
    auto const carrier = creator.make(field_list(naming(kernels), kernels));
    CHECK_EQUAL(enqueue(*plugin, small_fields(), {}), 0);
}

TEST(life, different_kernels_are_kept_apart) {
    StandIn const stand_in;
    auto const one = kernels_for({"90a"}), two = kernels_for({"80", "90a"});
    Creator creator;
    auto const first = creator.make(field_list(naming(one), one));
    auto const second = creator.make(field_list(naming(two), two));
    CHECK_EQUAL(enqueue(*first, small_fields(), {}), 0);
    CHECK_EQUAL(enqueue(*second, small_fields(), {}), 0);
    CHECK_EQUAL(stand_in_count("loads"), 2 * kernels_of_a_target);
}

TEST(life, a_layer_of_another_model_than_the_kernels_is_refused_when_it_runs) {
    StandIn const stand_in;
    auto const kernels = kernels_for();
    Creator creator;
    auto const carrier = creator.make(field_list(naming(kernels), kernels));
    auto other = naming(kernels);
    other.top_k = 6;
    auto const plugin = creator.make(field_list(other));
    CHECK(plugin != nullptr);
    CHECK(enqueue(*plugin, other, {}) != 0);
    CHECK(creator.log.told("top_k"));
    auto const descs = profile_of(other, {});
    CHECK(build_of(*plugin).configurePlugin(descs.data(), input_count, descs.data() + input_count, 1) != 0);
    CHECK(creator.log.told("top_k"));
    CHECK_EQUAL(stand_in_count("launches"), 0);
}

TEST(life, every_device_gets_kernels_of_its_own_target) {
    StandIn const stand_in;
    static std::map<int, std::string> images;
    images.clear();
    stand_in_set_capability(0, 9, 0);
    stand_in_set_capability(1, 8, 9);
    stand_in_set_launch([](void const* image, char const*, int device, unsigned*, unsigned, unsigned, void*, void**) {
        images[device] = static_cast<char const*>(image);
        return 0;
    });
    auto made = bundle_for(small_fields(), {"86", "90a"});
    for (auto& record : made.records) record.image += '\0';
    auto const kernels = made.bytes();
    Creator creator;
    auto const plugin = creator.make(field_list(naming(kernels), kernels));
    for (int round = 0; round < 3; ++round) {
        for (int const device : {0, 1}) {
            stand_in_set_device(device);
            CHECK_EQUAL(enqueue(*plugin, small_fields(), {}), 0);
        }
    }
    CHECK_EQUAL(images[0].substr(0, 10), "image 90a ");
    CHECK_EQUAL(images[1].substr(0, 9), "image 86 ");
    CHECK_EQUAL(stand_in_count("loads"), 2 * kernels_of_a_target);
    CHECK_EQUAL(stand_in_count("functions"), 2 * kernels_of_a_target);
    CHECK_EQUAL(stand_in_count("attributes"), 2 * attributes_of_a_target);

    stand_in_set_capability(2, 7, 5);
    stand_in_set_device(2);
    CHECK(enqueue(*plugin, small_fields(), {}) != 0);
    CHECK(creator.log.told("7.5", "86, 90a"));
}

TEST(life, of_two_threads_shares_what_is_loaded) {
    auto const kernels = kernels_for();
    for (int round = 0; round < 30; ++round) {
        StandIn const stand_in;
        Creator creator;
        auto const carrier = creator.make(field_list(naming(kernels), kernels));
        std::vector<std::thread> threads;
        std::vector<int> results(4);
        for (int each = 0; each < 4; ++each) {
            threads.emplace_back([&, each] {
                stand_in_set_device(each % 2);
                auto const own = creator.make(field_list(naming(kernels, each)));
                Plugin const clone(runtime_of(*own).attachToContext(nullptr));
                for (int step = 0; step < 20; ++step) results[each] |= enqueue(*clone, small_fields(), {});
            });
        }
        for (auto& thread : threads) thread.join();
        CHECK((results == std::vector<int>(4)));
        CHECK_EQUAL(stand_in_count("loads"), 2 * kernels_of_a_target);
        CHECK_EQUAL(stand_in_count("launches"), 4 * 20 * 4);
        CHECK_EQUAL(creator.log.take().size(), 0U);
    }
}

TEST(life, survives_every_failure_of_the_driver) {
    auto const kernels = kernels_for();
    for (auto const* function :
         {"cuInit", "cuCtxGetDevice", "cuDeviceGetAttribute", "cuLibraryLoadData", "cuLibraryGetKernel",
          "cuKernelSetAttribute", "cuKernelGetFunction", "cuFuncLoad", "cuLaunchKernel"}) {
        StandIn const stand_in;
        Creator creator;
        auto const plugin = creator.make(field_list(naming(kernels), kernels));
        stand_in_fail(function, 700);
        CHECK(enqueue(*plugin, small_fields(), {}) != 0);
        CHECK(creator.log.told(function, "700", "layer 0"));
        if (std::strcmp(function, "cuLaunchKernel") != 0) CHECK_EQUAL(stand_in.live(), 0);
        stand_in_fail(function, 0);
        CHECK_EQUAL(enqueue(*plugin, small_fields(), {}), 0);
        CHECK_EQUAL(stand_in.live(), kernels_of_a_target);
        CHECK_EQUAL(creator.log.take().size(), 0U);
    }
    StandIn const stand_in;
    Creator creator;
    auto plugin = creator.make(field_list(naming(kernels), kernels));
    CHECK_EQUAL(enqueue(*plugin, small_fields(), {}), 0);
    stand_in_fail("cuLibraryUnload", 4);  // the process ends, and the driver is gone already
    plugin.reset();
    CHECK_EQUAL(creator.log.take().size(), 0U);
}
