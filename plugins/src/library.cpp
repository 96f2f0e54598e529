#include "library.h"

#include <cstdio>
#include <string_view>

#include "refusal.h"
#include "score_plugin.h"

#define BPKV_EXPORT extern "C" __attribute__((visibility("default")))

namespace bpkv {

namespace {

constexpr char const* label = "libbpkv_plugin.so";

}  // namespace

ScoreCreator* creator() noexcept {
    try {
        static ScoreCreator only;
        return &only;
    } catch (...) {
        std::fputs("bpkv: libbpkv_plugin.so: out of memory when it was loaded.\n", stderr);
        return nullptr;
    }
}

void register_creator(ScoreCreator& creator, TensorRtProcess const& process) {
    process.expect_major();
    auto& registry = process.registry();
    nvinfer1::IPluginCreatorInterface& own = creator;
    if (registry.registerCreator(own, ScorePlugin::name_space)) return;
    if (registry.getCreator(ScorePlugin::name, ScorePlugin::version, ScorePlugin::name_space) == &own) return;
    throw Refusal("the registry of plugins refuses ", ScorePlugin::name, " in namespace ", ScorePlugin::name_space,
                  "; a second copy of this library, or another library, may have registered that name: load only one.");
}

}  // namespace bpkv

/// Called by the registry's loadLibrary().
BPKV_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
    using namespace bpkv;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {creator()};
    count = creators[0] == nullptr ? 0 : guarded(creator()->log(), label, 0, [] {
        if (auto const process = TensorRtProcess::find()) process->expect_major();
        return 1;
    });
    return creators;
}

/// Called by the registry's loadLibrary(), before getCreators().
BPKV_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    if (auto* const creator = bpkv::creator()) creator->log().use(finder);
}

/// Registers the plugin in the TensorRT of this process, for hosts that load the library themselves.
///
/// `logger` (an nvinfer1::ILogger) may be null, and so may `name_space`, which can only be the plugin's own: a registry
/// finds a creator by the namespace that this itself tells. Returns whether the plugin is registered.
BPKV_EXPORT bool initBpkvPlugins(void* logger, char const* name_space) {
    using namespace bpkv;
    auto* const own = creator();
    if (own == nullptr) return false;
    if (logger != nullptr) own->log().use(static_cast<nvinfer1::ILogger*>(logger));
    return guarded(own->log(), label, false, [&] {
        std::string_view const wanted = name_space == nullptr ? "" : name_space;
        if (!wanted.empty() && wanted != ScorePlugin::name_space) {
            throw Refusal("the plugin is in namespace ", ScorePlugin::name_space, " and cannot be put into ", wanted,
                          "; give that namespace, or none.");
        }
        auto const process = TensorRtProcess::find();
        if (!process) throw Refusal("TensorRT is not in this process; load libnvinfer before the plugin.");
        register_creator(*own, *process);
        return true;
    });
}
