#include "library.h"

#include <cstdio>

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

void register_creator(ScoreCreator& creator, TensorRtProcess const& process, char const* name_space) {
  process.expect_major();
  auto& registry = process.registry();
  nvinfer1::IPluginCreatorInterface& own = creator;
  if (registry.registerCreator(own, name_space)) return;
  if (registry.getCreator(ScorePlugin::name, ScorePlugin::version, name_space) == &own) return;  // it already was
  throw Refusal("the registry of plugins refuses ", ScorePlugin::name, " in namespace ", name_space,
                "; another library may have registered that name: load only one.");
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
/// `logger` (an nvinfer1::ILogger) may be null, and so may `name_space`. Returns whether the plugin is registered.
BPKV_EXPORT bool initBpkvPlugins(void* logger, char const* name_space) {
  using namespace bpkv;
  auto* const own = creator();
  if (own == nullptr) return false;
  if (logger != nullptr) own->log().use(static_cast<nvinfer1::ILogger*>(logger));
  return guarded(own->log(), label, false, [&] {
    auto const process = TensorRtProcess::find();
    if (!process) throw Refusal("TensorRT is not in this process; load libnvinfer before the plugin.");
    bool const named = name_space != nullptr && *name_space != '\0';
    register_creator(*own, *process, named ? name_space : ScorePlugin::name_space);
    return true;
  });
}
