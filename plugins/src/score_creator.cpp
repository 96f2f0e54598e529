#include "score_creator.h"

#include "score_fields.h"
#include "score_plugin.h"

namespace bpkv {

using namespace nvinfer1;

ScoreCreator::ScoreCreator()
    : names_(field_names()), collection_{static_cast<std::int32_t>(names_.size()), names_.data()} {}

IPluginV3* ScoreCreator::createPlugin(char const*, PluginFieldCollection const* collection,
                                      TensorRTPhase phase) noexcept {
    return guarded<IPluginV3*>(log(), "BpkvScore cannot be created", nullptr, [&] {
        auto const given = read_fields(collection);
        auto const kernels = services_->kernel_sets.get(given.fields.kernels_checksum);
        if (given.kernels) kernels->carry(*given.kernels);
        return new ScorePlugin(given.fields, kernels, given.kernels.has_value(), phase, services_);
    });
}

char const* ScoreCreator::getPluginName() const noexcept { return ScorePlugin::name; }
char const* ScoreCreator::getPluginVersion() const noexcept { return ScorePlugin::version; }
char const* ScoreCreator::getPluginNamespace() const noexcept { return ScorePlugin::name_space; }

}  // namespace bpkv
