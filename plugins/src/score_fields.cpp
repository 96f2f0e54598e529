#include "score_fields.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "refusal.h"

namespace bpkv {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

constexpr std::int32_t abi = 1;
constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();

// A kernel counts K and V of every layer before this one in int32.
constexpr std::int32_t most_layers = most / 2;
constexpr std::int32_t most_kv_heads = 65535;  // of a grid's second dimension

struct IntegerRule {
    char const* name;
    std::int32_t ScoreFields::* member;
    std::int32_t least;
    std::int32_t most;
};
constexpr std::array integer_rules{
    IntegerRule{"layer_in_pool", &ScoreFields::layer_in_pool, 0, most_layers},
    IntegerRule{"pool", &ScoreFields::pool, 0, most},
    IntegerRule{"query_heads", &ScoreFields::query_heads, 1, most},
    IntegerRule{"kv_heads", &ScoreFields::kv_heads, 1, most_kv_heads},
    IntegerRule{"head_dim", &ScoreFields::head_dim, 1, most},
    IntegerRule{"tokens_per_block", &ScoreFields::tokens_per_block, 1, most},
    IntegerRule{"top_k", &ScoreFields::top_k, 1, most},
    IntegerRule{"positions", &ScoreFields::positions, 1, most},
};

struct TypeRule {
    char const* name;
    NumberType ScoreFields::* member;
    int choices;
};
constexpr std::array type_rules{
    TypeRule{"cache", &ScoreFields::cache, static_cast<int>(number_type_names.size())},
    TypeRule{"activations", &ScoreFields::activations, activation_types},
};

struct ScaleRule {
    char const* name;
    float ScoreFields::* member;
};
constexpr std::array scale_rules{
    ScaleRule{"scale", &ScoreFields::scale},
    ScaleRule{"key_scale", &ScoreFields::key_scale},
    ScaleRule{"value_scale", &ScoreFields::value_scale},
};

std::string_view type_name(PluginFieldType type) {
    switch (type) {
        case PluginFieldType::kINT32: return "INT32";
        case PluginFieldType::kINT64: return "INT64";
        case PluginFieldType::kFLOAT32: return "FLOAT32";
        case PluginFieldType::kCHAR: return "CHAR";
        case PluginFieldType::kUNKNOWN: return "UNKNOWN";
        default: return "another type";
    }
}

/// What was given, by name: every name is one of ours, and comes once.
class GivenList {
public:
    explicit GivenList(nvinfer1::PluginFieldCollection const* given) {
        if (given == nullptr || given->nbFields < 0 || (given->nbFields > 0 && given->fields == nullptr)) {
            throw Refusal("no list of fields was given; give all that getFieldNames() lists.");
        }
        for (std::int32_t each = 0; each < given->nbFields; ++each) add(given->fields[each]);
    }

    bool has(char const* name) const { return find(name) != nullptr; }

    template <typename Value>
    Value number(char const* name, PluginFieldType type) const {
        auto const& field = get(name, type);
        if (field.length != 1) throw Refusal("field ", name, " has length ", field.length, "; give one number.");
        Value value;
        std::memcpy(&value, field.data, sizeof value);  // it may lie anywhere in a serialized engine
        return value;
    }

    std::string_view bytes(char const* name, PluginFieldType type) const {
        auto const& field = get(name, type);
        if (field.length < 1) throw Refusal("field ", name, " has length ", field.length, "; give 1 byte or more.");
        return {static_cast<char const*>(field.data), static_cast<std::size_t>(field.length)};
    }

private:
    struct Slot {
        char const* name;
        PluginField const* field = nullptr;
    };

    void add(PluginField const& field) {
        if (field.name == nullptr) throw Refusal("a field has no name; give those that getFieldNames() lists.");
        for (auto& slot : slots_) {
            if (std::strcmp(slot.name, field.name) != 0) continue;
            if (slot.field != nullptr) throw Refusal("field ", slot.name, " is given twice; give it once.");
            slot.field = &field;
            return;
        }
        throw Refusal("field ", field.name, " is unknown; build plugin and engine from one release.");
    }

    PluginField const* find(char const* name) const {
        for (auto const& slot : slots_) {
            if (std::strcmp(slot.name, name) == 0) return slot.field;
        }
        return nullptr;
    }

    PluginField const& get(char const* name, PluginFieldType type) const {
        auto const* const field = find(name);
        if (field == nullptr) throw Refusal("field ", name, " is missing; give it as ", type_name(type), ".");
        if (field->type != type) {
            throw Refusal("field ", name, " is ", type_name(field->type), "; give it as ", type_name(type), ".");
        }
        if (field->data == nullptr) throw Refusal("field ", name, " has no data; give a pointer to it.");
        return *field;
    }

    std::vector<Slot> slots_ = [] {
        std::vector<Slot> slots;
        for (auto const& field : field_names()) slots.push_back({field.name});
        return slots;
    }();
};

std::int32_t read_integer(GivenList const& given, IntegerRule const& rule) {
    auto const value = given.number<std::int32_t>(rule.name, PluginFieldType::kINT32);
    if (value < rule.least || value > rule.most) {
        throw Refusal("field ", rule.name, " is ", value, "; give a number from ", rule.least, " to ", rule.most, ".");
    }
    return value;
}

NumberType read_type(GivenList const& given, TypeRule const& rule) {
    auto name = given.bytes(rule.name, PluginFieldType::kCHAR);
    if (name.back() == '\0') name.remove_suffix(1);
    if (auto const type = number_type(name, rule.choices)) return *type;
    std::string choices;
    for (int each = 0; each < rule.choices; ++each) choices += text(each ? ", " : "", number_type_names[each]);
    throw Refusal("field ", rule.name, " is '", name, "'; give one of ", choices, ".");
}

float read_scale(GivenList const& given, ScaleRule const& rule) {
    auto const value = given.number<float>(rule.name, PluginFieldType::kFLOAT32);
    if (!std::isfinite(value)) throw Refusal("field ", rule.name, " is not finite; give a finite number.");
    return value;
}

}  // namespace

GivenFields read_fields(nvinfer1::PluginFieldCollection const* collection) {
    GivenList const given(collection);
    auto const version = given.number<std::int32_t>("abi", PluginFieldType::kINT32);
    if (version != abi) {
        throw Refusal("field abi is ", version, " and this library's is ", abi,
                      "; build plugin and engine from one release.");
    }
    GivenFields result;
    auto& fields = result.fields;
    for (auto const& rule : integer_rules) fields.*rule.member = read_integer(given, rule);
    for (auto const& rule : type_rules) fields.*rule.member = read_type(given, rule);
    for (auto const& rule : scale_rules) fields.*rule.member = read_scale(given, rule);
    if (fields.query_heads % fields.kv_heads != 0) {
        throw Refusal("field query_heads is ", fields.query_heads, " with kv_heads ", fields.kv_heads,
                      "; give a multiple of it.");
    }
    if (!std::isfinite(fields.scale * fields.key_scale)) {
        throw Refusal("fields scale and key_scale have a product that is not finite; give smaller ones.");
    }
    fields.kernels_checksum = given.number<std::int64_t>("kernels_checksum", PluginFieldType::kINT64);
    if (given.has("kernels")) result.kernels = given.bytes("kernels", PluginFieldType::kUNKNOWN);
    return result;
}

std::vector<PluginField> field_names() {
    std::vector<PluginField> names{{"abi", nullptr, PluginFieldType::kINT32, 1}};
    for (auto const& rule : integer_rules) names.push_back({rule.name, nullptr, PluginFieldType::kINT32, 1});
    for (auto const& rule : type_rules) names.push_back({rule.name, nullptr, PluginFieldType::kCHAR, 1});
    for (auto const& rule : scale_rules) names.push_back({rule.name, nullptr, PluginFieldType::kFLOAT32, 1});
    names.push_back({"kernels_checksum", nullptr, PluginFieldType::kINT64, 1});
    names.push_back({"kernels", nullptr, PluginFieldType::kUNKNOWN, 0});
    return names;
}

FieldsToSerialize::FieldsToSerialize(ScoreFields const& fields, std::optional<std::string_view> kernels)
    : fields_(fields) {
    list_.push_back({"abi", &abi, PluginFieldType::kINT32, 1});
    for (auto const& rule : integer_rules) {
        list_.push_back({rule.name, &(fields_.*rule.member), PluginFieldType::kINT32, 1});
    }
    for (auto const& rule : type_rules) {
        std::string_view const name = name_of(fields_.*rule.member);
        list_.push_back({rule.name, name.data(), PluginFieldType::kCHAR, static_cast<std::int32_t>(name.size())});
    }
    for (auto const& rule : scale_rules) {
        list_.push_back({rule.name, &(fields_.*rule.member), PluginFieldType::kFLOAT32, 1});
    }
    list_.push_back({"kernels_checksum", &fields_.kernels_checksum, PluginFieldType::kINT64, 1});
    if (kernels) {
        list_.push_back(
            {"kernels", kernels->data(), PluginFieldType::kUNKNOWN, static_cast<std::int32_t>(kernels->size())});
    }
    collection_ = {static_cast<std::int32_t>(list_.size()), list_.data()};
}

}  // namespace bpkv
