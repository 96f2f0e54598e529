#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

#include "services.h"

namespace bpkv {

/// Makes ScorePlugins, and has what they share.
class ScoreCreator final : public nvinfer1::IPluginCreatorV3One {
public:
    ScoreCreator();

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
    char const* getPluginName() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;

    Log& log() { return services_->log; }

private:
    std::shared_ptr<Services> const services_ = std::make_shared<Services>();  // plugins may outlive the creator
    std::vector<nvinfer1::PluginField> const names_;
    nvinfer1::PluginFieldCollection const collection_;
};

}  // namespace bpkv
