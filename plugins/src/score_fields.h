#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "geometry.h"

namespace bpkv {

/// What one layer's scoring is created from, without the kernels themselves.
struct ScoreFields : Geometry {
    std::int32_t layer_in_pool = 0;
    std::int32_t pool = 0;
    std::int32_t positions = 0;  // scoring rows of a sequence, at most
    float scale = 0;             // of q.k
    float key_scale = 0;         // of a stored number
    float value_scale = 0;
    std::int64_t kernels_checksum = 0;
};

struct GivenFields {
    ScoreFields fields;
    std::optional<std::string_view> kernels;  // a bundle's bytes, in the caller's memory
};

/// Read what TensorRT or a network builder gives; raises Refusal for what is missing, unknown, or out of range.
GivenFields read_fields(nvinfer1::PluginFieldCollection const* given);

/// The names and types of all fields, without values, as a creator advertises them.
std::vector<nvinfer1::PluginField> field_names();

/// Fields as TensorRT takes them for an engine. They point into themselves and into `kernels`: neither may move.
class FieldsToSerialize {
public:
    FieldsToSerialize(ScoreFields const& fields, std::optional<std::string_view> kernels);
    FieldsToSerialize(FieldsToSerialize const&) = delete;
    FieldsToSerialize& operator=(FieldsToSerialize const&) = delete;

    nvinfer1::PluginFieldCollection const& collection() const { return collection_; }

private:
    ScoreFields const fields_;
    std::vector<nvinfer1::PluginField> list_;
    nvinfer1::PluginFieldCollection collection_;
};

}  // namespace bpkv
