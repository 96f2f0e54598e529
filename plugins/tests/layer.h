#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "bundle_builder.h"
#include "captured_log.h"
#include "field_builder.h"
#include "score_creator.h"
#include "score_tensors.h"

namespace bpkv::test {

inline ScoreFields small_fields() {
    ScoreFields fields;
    fields.layer_in_pool = 3;
    fields.pool = 1;
    fields.query_heads = 6;
    fields.kv_heads = 2;
    fields.head_dim = 16;
    fields.tokens_per_block = 8;
    fields.top_k = 5;
    fields.positions = 4;
    fields.cache = NumberType::fp16;
    fields.activations = NumberType::fp16;
    fields.scale = 0.25F;
    fields.key_scale = 3.0F;
    fields.value_scale = 0.5F;
    return fields;
}

/// Sizes of one step.
struct Step {
    std::int64_t rows = 5, sequences = 2, blocks = 7, pools = 2;
};

/// Inputs, then the output, as TensorRT describes them.
inline std::vector<nvinfer1::PluginTensorDesc> descs_of(ScoreFields const& f, Step const& s) {
    auto const a = tensor_type(input_q, f.activations);
    auto const desc = [](nvinfer1::DataType type, std::vector<std::int64_t> const& extents) {
        nvinfer1::PluginTensorDesc result{};
        result.type = type;
        result.format = nvinfer1::TensorFormat::kLINEAR;
        result.dims.nbDims = static_cast<std::int32_t>(extents.size());
        std::copy(extents.begin(), extents.end(), result.dims.d);
        return result;
    };
    using nvinfer1::DataType;
    return {desc(a, {s.rows, f.query_heads, f.head_dim}),
            desc(a, {s.rows, f.query_heads, f.head_dim}),
            desc(a, {s.rows, f.top_k, f.query_heads, f.head_dim}),
            desc(DataType::kFLOAT, {s.rows, f.top_k}),
            desc(DataType::kFLOAT, {s.rows}),
            desc(DataType::kINT32, {s.sequences + 1}),
            desc(DataType::kINT32, {s.pools, s.sequences, 2, s.blocks}),
            desc(DataType::kINT32, {s.sequences}),
            desc(DataType::kINT64, {s.pools, 2}),
            desc(DataType::kFLOAT, {s.sequences, f.kv_heads, s.rows ? s.blocks * f.tokens_per_block : 0})};
}

/// The same as bounds of a profile: what a step sizes is open, from 0 to the step's.
inline std::vector<nvinfer1::DynamicPluginTensorDesc> profile_of(ScoreFields const& fields, Step const& largest) {
    auto const low = descs_of(fields, {0, 0, 0, largest.pools});
    std::vector<nvinfer1::DynamicPluginTensorDesc> result;
    for (auto const& desc : descs_of(fields, largest)) {
        auto const& min = low[result.size()].dims;
        nvinfer1::DynamicPluginTensorDesc tensor{desc, min, desc.dims, desc.dims};
        for (std::int32_t axis = 0; axis < desc.dims.nbDims; ++axis) {
            if (min.d[axis] != desc.dims.d[axis]) tensor.desc.dims.d[axis] = -1;
        }
        result.push_back(tensor);
    }
    return result;
}

/// A creator whose log is kept, apart from that of the library.
struct Creator {
    Creator() { creator.log().use(&log); }

    std::unique_ptr<nvinfer1::IPluginV3> make(FieldList fields,
                                              nvinfer1::TensorRTPhase phase = nvinfer1::TensorRTPhase::kRUNTIME) {
        auto* const made = creator.createPlugin("layer", fields.collection(), phase);
        return std::unique_ptr<nvinfer1::IPluginV3>(made);
    }

    CapturedLog log;
    ScoreCreator creator;
};

inline nvinfer1::IPluginV3OneBuild& build_of(nvinfer1::IPluginV3& plugin) {
    return *static_cast<nvinfer1::IPluginV3OneBuild*>(
        plugin.getCapabilityInterface(nvinfer1::PluginCapabilityType::kBUILD));
}

inline nvinfer1::IPluginV3OneRuntime& runtime_of(nvinfer1::IPluginV3& plugin) {
    return *static_cast<nvinfer1::IPluginV3OneRuntime*>(
        plugin.getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
}

/// Addresses as of device memory, and of a stream, which nobody reads.
struct Memory {
    std::array<void const*, input_count> inputs;
    std::array<void*, 1> outputs;
    void* workspace;
    cudaStream_t stream;

    Memory() {
        for (std::size_t each = 0; each < inputs.size(); ++each) inputs[each] = at(each + 1);
        outputs[0] = at(100);
        workspace = at(200);
        stream = static_cast<cudaStream_t>(at(300));
    }

private:
    static void* at(std::uintptr_t place) { return reinterpret_cast<void*>(place << 20); }
};

inline std::int32_t enqueue(nvinfer1::IPluginV3& plugin, ScoreFields const& fields, Step const& step,
                            Memory const& memory = {}) {
    auto const descs = descs_of(fields, step);
    return runtime_of(plugin).enqueue(descs.data(), descs.data() + input_count, memory.inputs.data(),
                                      memory.outputs.data(), memory.workspace, memory.stream);
}

}  // namespace bpkv::test
