// The library itself, as a host loads it: BPKV_PLUGIN is its path. What else the process can load is set by ctest.

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#include "captured_log.h"
#include "check.h"
#include "layer.h"

using namespace bpkv;
using namespace bpkv::test;
using nvinfer1::IPluginCreatorInterface;
using nvinfer1::IPluginCreatorV3One;

namespace {

struct Library {
    Library() : handle(dlopen(std::getenv("BPKV_PLUGIN"), RTLD_NOW)) {
        if (handle == nullptr) throw std::runtime_error(dlerror());
    }

    template <typename Function>
    Function* find(char const* name) const {
        return reinterpret_cast<Function*>(dlsym(handle, name));
    }
    IPluginCreatorV3One* creator() const {
        std::int32_t count = 0;
        auto const* const list = find<IPluginCreatorInterface* const*(std::int32_t&)>("getCreators")(count);
        return count == 1 ? static_cast<IPluginCreatorV3One*>(list[0]) : nullptr;
    }
    bool init(nvinfer1::ILogger& log, char const* name_space) const {
        return find<bool(void*, char const*)>("initBpkvPlugins")(&log, name_space);
    }

    void* handle;
};

nvinfer1::IPluginRegistry& load_tensorrt(int mode) {
    void* const library = dlopen(BPKV_LIBNVINFER, RTLD_NOW | mode);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return *reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(library, "getPluginRegistry"))();
}

void expect_registered(nvinfer1::IPluginRegistry& registry, Library const& library) {
    CapturedLog log;
    CHECK(library.creator() != nullptr);
    CHECK(library.init(log, nullptr));
    CHECK(library.init(log, "bpkv"));  // once more: it is there
    CHECK(registry.getCreator("BpkvScore", "1", "bpkv") == library.creator());
    CHECK(registry.getCreator("BpkvScore", "1", "other") == nullptr);
    CHECK(!library.init(log, "other"));
    CHECK(log.told("namespace bpkv", "other"));
    CHECK(registry.deregisterCreator(*library.creator()));
    CHECK(registry.loadLibrary(std::getenv("BPKV_PLUGIN")) != nullptr);
    CHECK(registry.getCreator("BpkvScore", "1", "bpkv") == library.creator());
    CHECK_EQUAL(log.take().size(), 0U);
}

/// Enqueue twice with this process's driver; if a word is given, both fail for a reason that has it.
void expect_enqueue(char const* word) {
    Library const library;
    CapturedLog log;
    library.init(log, nullptr);
    log.take();
    auto const fields = small_fields();
    auto const kernels = bundle_for(fields, {"80", "90a"}).bytes();
    auto list = field_list(fields, kernels);
    std::unique_ptr<nvinfer1::IPluginV3> const plugin(
        library.creator()->createPlugin("", list.collection(), nvinfer1::TensorRTPhase::kRUNTIME));
    for (int round = 0; round < 2; ++round) {
        CHECK_EQUAL(enqueue(*plugin, fields, {}) != 0, word != nullptr);
        CHECK(word == nullptr ? log.take().empty() : log.told("driver", word));
    }
}

}  // namespace

TEST(exports, work_without_tensorrt) {
    Library const library;
    CHECK(library.creator() != nullptr);
    CHECK_EQUAL(std::string(library.creator()->getPluginName()), "BpkvScore");
    CHECK_EQUAL(std::string(library.creator()->getPluginVersion()), "1");
    CHECK_EQUAL(std::string(library.creator()->getPluginNamespace()), "bpkv");
    CapturedLog log;
    CHECK(!library.init(log, nullptr));
    CHECK(log.told("load libnvinfer"));
    library.find<void(nvinfer1::ILoggerFinder*)>("setLoggerFinder")(nullptr);
    for (auto const* name : {"cuInit", "getPluginRegistry", "_ZTIN4bpkv7RefusalE"}) {
        CHECK(dlsym(library.handle, name) == nullptr);
    }
}

TEST(tensorrt, finds_the_plugin) { expect_registered(load_tensorrt(RTLD_GLOBAL), Library()); }

TEST(hidden_tensorrt, finds_the_plugin) { expect_registered(load_tensorrt(RTLD_LOCAL), Library()); }

TEST(other_tensorrt, of_another_major_version_gets_no_plugin) {
    load_tensorrt(RTLD_GLOBAL);
    Library const library;
    CapturedLog log;
    CHECK(!library.init(log, nullptr));
    CHECK(log.told("TensorRT 99"));
    CHECK(library.creator() == nullptr);
    CHECK(log.told("TensorRT 99"));
}

TEST(without_driver, enqueue_fails) { expect_enqueue("libcuda.so.1"); }

TEST(old_driver, enqueue_fails) { expect_enqueue("CUDA 12"); }

TEST(driver_before_12_4, is_enough) { expect_enqueue(nullptr); }

TEST(preloaded, the_plugin_is_in_the_registry_of_what_is_loaded_later) {
    auto& registry = load_tensorrt(RTLD_LOCAL);
    CHECK(registry.getCreator("BpkvScore", "1", "bpkv") == Library().creator());
    CHECK(Library().creator() != nullptr);
}

TEST(preloaded_another, the_plugin_waits_for_its_host) {
    auto& registry = load_tensorrt(RTLD_LOCAL);
    Library const library;
    CHECK(registry.getCreator("BpkvScore", "1", "bpkv") == nullptr);
    CapturedLog log;
    CHECK(library.init(log, nullptr));
    CHECK(registry.getCreator("BpkvScore", "1", "bpkv") == library.creator());
}

TEST(preloaded_alone, nothing_else_happens) {}
