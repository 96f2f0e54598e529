#pragma once

#include <NvInferRuntime.h>

#include <cstring>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checksum.h"
#include "score_fields.h"

namespace bpkv::test {

/// Fields with data of their own, to be changed before they are given.
class FieldList {
public:
    struct Field {
        std::string name;
        nvinfer1::PluginFieldType type;
        std::string data;
        std::int32_t length;
        bool has_data = true;
        bool has_name = true;
    };

    template <typename Value>
    void add(char const* name, nvinfer1::PluginFieldType type, Value value) {
        fields.push_back({name, type, std::string(reinterpret_cast<char const*>(&value), sizeof value), 1});
    }
    void add_text(char const* name, nvinfer1::PluginFieldType type, std::string_view text) {
        fields.push_back({name, type, std::string(text), static_cast<std::int32_t>(text.size())});
    }

    Field& operator[](std::string_view name) {
        for (auto& field : fields) {
            if (field.name == name) return field;
        }
        throw std::runtime_error("no such field");
    }
    template <typename Value>
    void set(char const* name, Value value) {
        (*this)[name].data.assign(reinterpret_cast<char const*>(&value), sizeof value);
    }
    void remove(std::string_view name) {
        fields.remove_if([&](auto const& field) { return field.name == name; });
    }

    /// Valid until the next change.
    nvinfer1::PluginFieldCollection const* collection() {
        list_.clear();
        for (auto const& field : fields) {
            list_.push_back({field.has_name ? field.name.c_str() : nullptr,
                             field.has_data ? field.data.data() : nullptr, field.type, field.length});
        }
        collection_ = {static_cast<std::int32_t>(list_.size()), list_.data()};
        return &collection_;
    }

    std::list<Field> fields;

private:
    std::vector<nvinfer1::PluginField> list_;
    nvinfer1::PluginFieldCollection collection_{};
};

inline FieldList field_list(ScoreFields const& given, std::optional<std::string_view> kernels = std::nullopt) {
    using Type = nvinfer1::PluginFieldType;
    FieldList list;
    list.add("abi", Type::kINT32, std::int32_t{1});
    list.add("layer_in_pool", Type::kINT32, given.layer_in_pool);
    list.add("pool", Type::kINT32, given.pool);
    list.add("query_heads", Type::kINT32, given.query_heads);
    list.add("kv_heads", Type::kINT32, given.kv_heads);
    list.add("head_dim", Type::kINT32, given.head_dim);
    list.add("tokens_per_block", Type::kINT32, given.tokens_per_block);
    list.add("top_k", Type::kINT32, given.top_k);
    list.add("positions", Type::kINT32, given.positions);
    list.add_text("cache", Type::kCHAR, name_of(given.cache));
    list.add_text("activations", Type::kCHAR, name_of(given.activations));
    list.add("scale", Type::kFLOAT32, given.scale);
    list.add("key_scale", Type::kFLOAT32, given.key_scale);
    list.add("value_scale", Type::kFLOAT32, given.value_scale);
    list.add("kernels_checksum", Type::kINT64, kernels ? checksum_of(*kernels) : given.kernels_checksum);
    if (kernels) list.add_text("kernels", Type::kUNKNOWN, *kernels);
    return list;
}

}  // namespace bpkv::test
