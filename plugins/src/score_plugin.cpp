#include "score_plugin.h"

#include <limits>
#include <utility>

#include "refusal.h"
#include "score_arguments.h"
#include "score_launches.h"
#include "score_shape.h"
#include "score_tensors.h"
#include "score_workspace.h"

namespace bpkv {

using namespace nvinfer1;

namespace {

constexpr std::int32_t success = 0;
constexpr std::int32_t failure = 1;

IDimensionExpr const& expect(IDimensionExpr const* expression) {
    if (expression == nullptr) throw Refusal("TensorRT gave no expression for the output's shape; report this.");
    return *expression;
}

}  // namespace

ScorePlugin::ScorePlugin(ScoreFields const& fields, std::shared_ptr<KernelSet> kernels, bool carries,
                         TensorRTPhase phase, std::shared_ptr<Services const> services)
    : fields_(fields),
      kernels_(std::move(kernels)),
      carries_(carries),
      phase_(phase),
      services_(std::move(services)),
      label_(text("BpkvScore of layer ", fields.layer_in_pool, " in pool ", fields.pool)),
      serialized_(fields, carries ? std::optional(kernels_->bundle().bytes()) : std::nullopt) {
    if (carries_) expect_equal(kernels_->bundle().geometry(), fields_);
}

IPluginCapability* ScorePlugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* ScorePlugin::clone() noexcept {
    return guarded<IPluginV3*>(services_->log, label_, nullptr,
                               [&] { return new ScorePlugin(fields_, kernels_, carries_, phase_, services_); });
}

std::int32_t ScorePlugin::getNbOutputs() const noexcept { return output_count; }

std::int32_t ScorePlugin::getOutputDataTypes(DataType* outputs, std::int32_t outputs_given, DataType const*,
                                             std::int32_t inputs_given) const noexcept {
    return guarded(services_->log, label_, failure, [&] {
        expect_counts(inputs_given, outputs_given);
        outputs[0] = tensor_type(input_count, fields_.activations);
        return success;
    });
}

std::int32_t ScorePlugin::getOutputShapes(DimsExprs const* inputs, std::int32_t inputs_given, DimsExprs const*,
                                          std::int32_t, DimsExprs* outputs, std::int32_t outputs_given,
                                          IExprBuilder& builder) noexcept {
    return guarded(services_->log, label_, failure, [&] {
        expect_counts(inputs_given, outputs_given);
        expect_ranks(inputs);
        auto const constant = [&](std::int64_t value) -> auto const& { return expect(builder.constant(value)); };
        auto const operation = [&](DimensionOperation what, IDimensionExpr const& a,
                                   IDimensionExpr const& b) -> auto const& {
            return expect(builder.operation(what, a, b));
        };
        auto const& rows = expect(inputs[input_q].d[0]);
        auto const& sequences = expect(inputs[input_block_offsets].d[1]);
        auto const& blocks = expect(inputs[input_block_offsets].d[3]);
        auto const& capacity = operation(DimensionOperation::kPROD, blocks, constant(fields_.tokens_per_block));
        auto const& any = operation(DimensionOperation::kMIN, rows, constant(1));  // nothing is scored without rows
        outputs[0].nbDims = 3;
        outputs[0].d[0] = &sequences;
        outputs[0].d[1] = &constant(fields_.kv_heads);
        outputs[0].d[2] = &operation(DimensionOperation::kPROD, capacity, any);
        return success;
    });
}

bool ScorePlugin::supportsFormatCombination(std::int32_t place, DynamicPluginTensorDesc const* tensors,
                                            std::int32_t inputs_given, std::int32_t outputs_given) noexcept {
    if (inputs_given != input_count || outputs_given != output_count) return false;
    if (place < 0 || place >= input_count + output_count) return false;
    auto const& tensor = tensors[place].desc;
    return tensor.format == TensorFormat::kLINEAR && tensor.type == tensor_type(place, fields_.activations);
}

std::int32_t ScorePlugin::configurePlugin(DynamicPluginTensorDesc const* inputs, std::int32_t inputs_given,
                                          DynamicPluginTensorDesc const*, std::int32_t outputs_given) noexcept {
    return guarded(services_->log, label_, failure, [&] {
        expect_counts(inputs_given, outputs_given);
        ScoreShape::largest(fields_, inputs);
        expect_equal(kernels_->bundle().geometry(), fields_);  // all layers are there: an engine without is of no use
        return success;
    });
}

std::size_t ScorePlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, std::int32_t inputs_given,
                                          DynamicPluginTensorDesc const*, std::int32_t outputs_given) const noexcept {
    // More than any device has: TensorRT must not go on with a workspace that is too small.
    std::size_t const impossible = std::numeric_limits<std::int64_t>::max();
    return guarded(services_->log, label_, impossible, [&] {
        expect_counts(inputs_given, outputs_given);
        auto const shape = ScoreShape::largest(fields_, inputs);
        auto const& bundle = kernels_->bundle();
        auto const splits = splits_of(shape.capacity, bundle.rows_per_split(), bundle.most_splits());
        return ScoreWorkspace(fields_, shape, splits).bytes;
    });
}

std::int32_t ScorePlugin::onShapeChange(PluginTensorDesc const* inputs, std::int32_t inputs_given,
                                        PluginTensorDesc const* outputs, std::int32_t outputs_given) noexcept {
    return guarded(services_->log, label_, failure, [&] {
        expect_counts(inputs_given, outputs_given);
        ScoreShape::of(fields_, inputs).expect_output(fields_, outputs[0].dims);
        return success;
    });
}

std::int32_t ScorePlugin::enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const*,
                                  void const* const* inputs, void* const* outputs, void* workspace,
                                  cudaStream_t stream) noexcept {
    return guarded(services_->log, label_, failure, [&] {
        auto const shape = ScoreShape::of(fields_, input_descs);
        bool const scores = phase_ == TensorRTPhase::kRUNTIME && !shape.empty();
        if (scores) score(shape, inputs, outputs[0], workspace, stream);
        return success;
    });
}

void ScorePlugin::score(ScoreShape const& shape, void const* const* inputs, void* scores, void* workspace,
                        CUstream stream) {
    shape.expect_positions(fields_);
    NvtxRange const range(services_->nvtx, "score", shape.rows);
    auto const& bundle = kernels_->bundle();
    expect_equal(bundle.geometry(), fields_);
    auto const& loaded = kernels_->on_current_device();
    ScoreLaunches const launches(fields_, shape, loaded.target(), bundle.rows_per_split());
    ScoreWorkspace const places(fields_, shape, launches.splits);
    ScoreArguments arguments(fields_, shape, launches, places, inputs, scores, workspace);
    for (auto const& launch : launches.list) loaded.launch(launch, arguments, stream);
}

IPluginV3* ScorePlugin::attachToContext(IPluginResourceContext*) noexcept { return clone(); }

PluginFieldCollection const* ScorePlugin::getFieldsToSerialize() noexcept { return &serialized_.collection(); }

}  // namespace bpkv
