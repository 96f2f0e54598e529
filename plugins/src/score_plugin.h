#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>

#include "kernel_set.h"
#include "score_fields.h"
#include "services.h"

namespace bpkv {

/// Scores of one attention layer: what evicting each entry of the cache alone would do.
///
/// Inputs and output as `score_tensors.h` and `score_shape.h` have them. TensorRT calls one object from one thread at
/// a time; what it shares with others is thread-safe.
class ScorePlugin final : public nvinfer1::IPluginV3,
                          public nvinfer1::IPluginV3OneCore,
                          public nvinfer1::IPluginV3OneBuild,
                          public nvinfer1::IPluginV3OneRuntime {
public:
    static constexpr char const* name = "BpkvScore";
    static constexpr char const* version = "1";
    static constexpr char const* name_space = "bpkv";

    /// A layer that `carries` the kernels also serializes them. Raises Refusal if it does and they are for others.
    ///
    /// Only in the phase kRUNTIME does it score: a builder that measures its time gives tensors that mean nothing.
    ScorePlugin(ScoreFields const& fields, std::shared_ptr<KernelSet> kernels, bool carries,
                nvinfer1::TensorRTPhase phase, std::shared_ptr<Services const> services);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override { return name; }
    char const* getPluginVersion() const noexcept override { return version; }
    char const* getPluginNamespace() const noexcept override { return name_space; }

    std::int32_t getNbOutputs() const noexcept override;
    std::int32_t getOutputDataTypes(nvinfer1::DataType* outputs, std::int32_t output_count,
                                    nvinfer1::DataType const* inputs, std::int32_t input_count) const noexcept override;
    std::int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, std::int32_t input_count,
                                 nvinfer1::DimsExprs const* shape_inputs, std::int32_t shape_input_count,
                                 nvinfer1::DimsExprs* outputs, std::int32_t output_count,
                                 nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(std::int32_t place, nvinfer1::DynamicPluginTensorDesc const* tensors,
                                   std::int32_t input_count, std::int32_t output_count) noexcept override;
    std::int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, std::int32_t input_count,
                                 nvinfer1::DynamicPluginTensorDesc const* outputs,
                                 std::int32_t output_count) noexcept override;
    std::size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, std::int32_t input_count,
                                 nvinfer1::DynamicPluginTensorDesc const* outputs,
                                 std::int32_t output_count) const noexcept override;

    std::int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, std::int32_t input_count,
                               nvinfer1::PluginTensorDesc const* outputs, std::int32_t output_count) noexcept override;
    std::int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
                         void const* const* inputs, void* const* outputs, void* workspace,
                         cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    void score(ScoreShape const& shape, void const* const* inputs, void* scores, void* workspace, CUstream stream);

    ScoreFields const fields_;
    std::shared_ptr<KernelSet> const kernels_;
    bool const carries_;
    nvinfer1::TensorRTPhase const phase_;
    std::shared_ptr<Services const> const services_;
    std::string const label_;  // in log lines
    FieldsToSerialize const serialized_;
};

}  // namespace bpkv
