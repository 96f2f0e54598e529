#include <cmath>
#include <limits>
#include <set>

#include "check.h"
#include "layer.h"
#include "text.h"

using namespace bpkv;
using namespace bpkv::test;
using Type = nvinfer1::PluginFieldType;

namespace {

bool equal(ScoreFields const& a, ScoreFields const& b) {
    return a.layer_in_pool == b.layer_in_pool && a.pool == b.pool && a.query_heads == b.query_heads &&
           a.kv_heads == b.kv_heads && a.head_dim == b.head_dim && a.tokens_per_block == b.tokens_per_block &&
           a.top_k == b.top_k && a.positions == b.positions && a.cache == b.cache && a.activations == b.activations &&
           a.scale == b.scale && a.key_scale == b.key_scale && a.value_scale == b.value_scale &&
           a.kernels_checksum == b.kernels_checksum;
}

void expect_refused(FieldList list, char const* name, std::string const& why) {
    Creator creator;
    auto const plugin = creator.make(std::move(list));
    bool const refused = plugin == nullptr && creator.log.told(name);
    bpkv::test::check(refused, text("refused: ", name, " ", why), __FILE__, __LINE__);
}

}  // namespace

TEST(fields, come_back_from_what_is_serialized) {
    auto fields = small_fields();
    fields.kernels_checksum = std::numeric_limits<std::int64_t>::min() + 7;
    fields.cache = NumberType::fp8e4m3;
    fields.activations = NumberType::bf16;
    Creator creator;
    auto const first = creator.make(field_list(fields));
    auto const second = creator.creator.createPlugin("again", runtime_of(*first).getFieldsToSerialize(),
                                                     nvinfer1::TensorRTPhase::kRUNTIME);
    CHECK(second != nullptr);
    auto const given = read_fields(runtime_of(*second).getFieldsToSerialize());
    CHECK(equal(given.fields, fields));
    CHECK(!given.kernels);
    CHECK_EQUAL(creator.log.take().size(), 0U);
    delete second;
}

TEST(fields, of_a_carrier_come_back_with_the_same_kernels) {
    auto const fields = small_fields();
    auto const kernels = bundle_for(fields, {"80", "90a"}).bytes();
    Creator creator;
    auto const first = creator.make(field_list(fields, kernels));
    auto const given = read_fields(runtime_of(*first).getFieldsToSerialize());
    CHECK(given.kernels && *given.kernels == kernels);
    std::unique_ptr<nvinfer1::IPluginV3> const clone(first->clone());
    auto const of_clone = read_fields(runtime_of(*clone).getFieldsToSerialize());
    CHECK(of_clone.kernels && *of_clone.kernels == kernels);
    CHECK(equal(of_clone.fields, given.fields));
}

TEST(fields, are_those_that_the_creator_names) {
    Creator creator;
    auto const* const names = creator.creator.getFieldNames();
    auto list = field_list(small_fields(), "some kernels");
    CHECK_EQUAL(static_cast<std::size_t>(names->nbFields), list.fields.size());
    for (int each = 0; each < names->nbFields; ++each) {
        auto const& field = list[names->fields[each].name];
        CHECK(field.type == names->fields[each].type);
        CHECK(names->fields[each].data == nullptr);
        CHECK_EQUAL(names->fields[each].length, field.name == "kernels" ? 0 : 1);
    }
}

TEST(fields, may_come_in_any_order_and_text_with_its_end) {
    auto list = field_list(small_fields());
    list.fields.reverse();
    for (auto const* name : {"cache", "activations"}) {
        list[name].data += '\0';
        ++list[name].length;
    }
    Creator creator;
    auto const plugin = creator.make(list);
    CHECK(plugin != nullptr);
    CHECK(read_fields(runtime_of(*plugin).getFieldsToSerialize()).fields.cache == NumberType::fp16);
}

TEST(fields, that_are_missing_twice_or_of_another_form_are_refused_by_name) {
    auto const kernels = bundle_for(small_fields(), {"80"}).bytes();
    auto const whole = field_list(small_fields(), kernels);
    for (auto const& field : whole.fields) {
        auto const* const name = field.name.c_str();
        if (field.name != "kernels") {
            auto list = whole;
            list.remove(field.name);
            expect_refused(list, name, "missing");
        }
        auto twice = whole;
        twice.fields.push_back(field);
        expect_refused(twice, name, "twice");
        for (std::int32_t type = -1; type <= 14; ++type) {
            if (static_cast<Type>(type) == field.type) continue;
            auto list = whole;
            list[field.name].type = static_cast<Type>(type);
            expect_refused(list, name, text("of type ", type));
        }
        auto without_data = whole;
        without_data[field.name].has_data = false;
        expect_refused(without_data, name, "without data");
        bool const text_or_bytes = field.type == Type::kCHAR || field.type == Type::kUNKNOWN;
        for (std::int32_t const length : {-1, 0, 2}) {
            if (text_or_bytes && length == 2) continue;
            auto list = whole;
            list[field.name].length = length;
            expect_refused(list, name, text("of length ", length));
        }
    }
}

TEST(fields, out_of_range_are_refused_by_name) {
    auto const whole = field_list(small_fields());
    std::vector<std::pair<char const*, std::int32_t>> const wrong{
        {"abi", 0},         {"abi", 2},        {"layer_in_pool", -1}, {"layer_in_pool", 1 << 30}, {"pool", -1},
        {"query_heads", 0}, {"kv_heads", 0},   {"kv_heads", -2},      {"kv_heads", 65536},        {"head_dim", 0},
        {"top_k", 0},       {"positions", 0},  {"positions", -4},     {"tokens_per_block", 0},    {"head_dim", -16},
        {"query_heads", 7}, {"query_heads", 1}};
    for (auto const& [name, value] : wrong) {
        auto list = whole;
        list.set(name, value);
        expect_refused(list, name, text("is ", value));
    }
    for (auto const* name : {"scale", "key_scale", "value_scale"}) {
        for (float const value : {INFINITY, -INFINITY, NAN}) {
            auto list = whole;
            list.set(name, value);
            expect_refused(list, name, "not finite");
        }
    }
    auto product = whole;
    product.set("scale", 1e30F);
    product.set("key_scale", 1e30F);
    expect_refused(product, "key_scale", "with scale beyond float");
    for (auto const& [name, value] :
         std::vector<std::pair<char const*, std::string>>{{"cache", "fp64"},
                                                          {"cache", "FP16"},
                                                          {"cache", std::string("fp16\0\0", 6)},
                                                          {"activations", "int8"},
                                                          {"activations", "fp8e4m3"},
                                                          {"activations", "fp1"},
                                                          {"cache", std::string(1, '\0')}}) {
        auto list = whole;
        list[name].data = value;
        list[name].length = static_cast<std::int32_t>(value.size());
        expect_refused(list, name, value);
    }
}

TEST(fields, that_are_unknown_or_have_no_name_are_refused) {
    auto unknown = field_list(small_fields());
    unknown.add("sink_tokens", Type::kINT32, std::int32_t{4});
    expect_refused(unknown, "sink_tokens", "unknown");
    auto nameless = field_list(small_fields());
    nameless["pool"].has_name = false;
    expect_refused(nameless, "no name", "");
    Creator creator;
    nvinfer1::PluginFieldCollection const none{3, nullptr}, negative{-1, nullptr};
    for (auto const* given : std::initializer_list<nvinfer1::PluginFieldCollection const*>{nullptr, &none, &negative}) {
        CHECK(creator.creator.createPlugin("", given, nvinfer1::TensorRTPhase::kBUILD) == nullptr);
        CHECK(creator.log.told("getFieldNames"));
    }
}

TEST(fields, need_not_be_aligned) {
    auto list = field_list(small_fields());
    std::list<std::string> shifted;
    std::vector<nvinfer1::PluginField> fields;
    for (auto const& field : list.fields) {
        auto const& data = shifted.emplace_back("?" + field.data);
        fields.push_back({field.name.c_str(), data.data() + 1, field.type, field.length});
    }
    auto const given =
        read_fields(std::make_unique<nvinfer1::PluginFieldCollection>(
                        nvinfer1::PluginFieldCollection{static_cast<std::int32_t>(fields.size()), fields.data()})
                        .get());
    CHECK(equal(given.fields, small_fields()));
}
