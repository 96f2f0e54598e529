#include <limits>

#include "check.h"
#include "layer.h"
#include "score_shape.h"
#include "shape_expressions.h"

using namespace bpkv;
using namespace bpkv::test;
using nvinfer1::DataType;

namespace {

struct Layer {
    explicit Layer(ScoreFields const& given = small_fields())
        : fields(given), plugin(creator.make(field_list(fields, bundle_for(fields, {"80"}).bytes()))) {}

    std::int32_t shape_change(std::vector<nvinfer1::PluginTensorDesc> const& descs) {
        return runtime_of(*plugin).onShapeChange(descs.data(), input_count, descs.data() + input_count, 1);
    }
    std::int32_t configure(std::vector<nvinfer1::DynamicPluginTensorDesc> const& descs) {
        return build_of(*plugin).configurePlugin(descs.data(), input_count, descs.data() + input_count, 1);
    }

    ScoreFields fields;
    Creator creator;
    std::unique_ptr<nvinfer1::IPluginV3> plugin;
};

}  // namespace

TEST(shape, of_the_output_follows_from_the_inputs) {
    Layer layer;
    for (Step const step : {Step{5, 2, 7, 2}, Step{0, 2, 7, 2}, Step{1, 1, 1, 2}, Step{9, 3, 0, 2}, Step{0, 0, 0, 2}}) {
        Calculator calculator;
        std::vector<nvinfer1::DimsExprs> inputs;
        for (auto const& desc : descs_of(layer.fields, step)) {
            auto& input = inputs.emplace_back();
            input.nbDims = desc.dims.nbDims;
            for (int axis = 0; axis < input.nbDims; ++axis) input.d[axis] = calculator.number(desc.dims.d[axis]);
        }
        nvinfer1::DimsExprs output{};
        auto& build = build_of(*layer.plugin);
        CHECK_EQUAL(build.getOutputShapes(inputs.data(), input_count, nullptr, 0, &output, 1, calculator), 0);
        CHECK_EQUAL(output.nbDims, 3);
        CHECK_EQUAL(value_of(output.d[0]), step.sequences);
        CHECK_EQUAL(value_of(output.d[1]), 2);
        CHECK_EQUAL(value_of(output.d[2]), step.rows > 0 ? step.blocks * 8 : 0);
        CHECK(build.getOutputShapes(inputs.data(), 8, nullptr, 0, &output, 1, calculator) != 0);
        CHECK(layer.creator.log.told("8 inputs"));
        inputs[input_block_offsets].nbDims = 3;
        CHECK(build.getOutputShapes(inputs.data(), input_count, nullptr, 0, &output, 1, calculator) != 0);
        CHECK(layer.creator.log.told("block_offsets"));
    }
}

TEST(shape, types_are_the_only_ones_supported) {
    for (auto const activations : {NumberType::fp32, NumberType::fp16, NumberType::bf16}) {
        auto fields = small_fields();
        fields.activations = activations;
        Layer layer(fields);
        auto const a = activations == NumberType::fp32   ? DataType::kFLOAT
                       : activations == NumberType::fp16 ? DataType::kHALF
                                                         : DataType::kBF16;
        DataType const wanted[] = {a,
                                   a,
                                   a,
                                   DataType::kFLOAT,
                                   DataType::kFLOAT,
                                   DataType::kINT32,
                                   DataType::kINT32,
                                   DataType::kINT32,
                                   DataType::kINT64,
                                   DataType::kFLOAT};
        auto tensors = profile_of(fields, {});
        for (std::int32_t place = 0; place < input_count + 1; ++place) {
            for (std::int32_t type = 0; type < nvinfer1::EnumMax<DataType>(); ++type) {
                for (std::int32_t format = 0; format < nvinfer1::EnumMax<nvinfer1::TensorFormat>(); ++format) {
                    tensors[place].desc.type = static_cast<DataType>(type);
                    tensors[place].desc.format = static_cast<nvinfer1::TensorFormat>(format);
                    bool const good = tensors[place].desc.type == wanted[place] &&
                                      tensors[place].desc.format == nvinfer1::TensorFormat::kLINEAR;
                    CHECK_EQUAL(build_of(*layer.plugin).supportsFormatCombination(place, tensors.data(), 9, 1), good);
                }
            }
            tensors = profile_of(fields, {});
        }
        for (std::int32_t const place : {-1, 10}) {
            CHECK(!build_of(*layer.plugin).supportsFormatCombination(place, tensors.data(), 9, 1));
        }
        CHECK(!build_of(*layer.plugin).supportsFormatCombination(0, tensors.data(), 8, 1));
        DataType output = DataType::kINT8;
        CHECK_EQUAL(build_of(*layer.plugin).getOutputDataTypes(&output, 1, wanted, 9), 0);
        CHECK(output == DataType::kFLOAT);
        CHECK_EQUAL(build_of(*layer.plugin).getNbOutputs(), 1);
    }
}

TEST(shape, changes_are_taken_where_all_inputs_agree) {
    Layer layer;
    for (Step const step :
         {Step{5, 2, 7, 2}, Step{0, 2, 7, 2}, Step{0, 0, 0, 2}, Step{3, 1, 0, 5}, Step{65535, 65535, 1, 2}}) {
        CHECK_EQUAL(layer.shape_change(descs_of(layer.fields, step)), 0);
    }
    CHECK_EQUAL(layer.creator.log.take().size(), 0U);
}

TEST(shape, that_disagrees_anywhere_is_refused_by_the_input_s_name) {
    Layer layer;
    auto const good = descs_of(layer.fields, {});
    for (std::int32_t place = 0; place < input_count + 1; ++place) {
        for (std::int32_t axis = 0; axis < good[place].dims.nbDims; ++axis) {
            for (std::int64_t const off : {-1, 1}) {
                auto descs = good;
                descs[place].dims.d[axis] += off;
                CHECK(layer.shape_change(descs) != 0);
                // The first input of an extent sets it, and the next is then named.
                bool const first = (place == input_q && axis == 0) || (place == input_offsets) ||
                                   (place == input_block_offsets && axis != 2);
                CHECK(layer.creator.log.told(first                  ? "expected"
                                             : place == input_count ? "scores"
                                                                    : input_names[place]));
            }
        }
        for (std::int32_t const rank : {-1, 0, good[place].dims.nbDims - 1, good[place].dims.nbDims + 1, 8}) {
            auto descs = good;
            descs[place].dims.nbDims = rank;
            CHECK(layer.shape_change(descs) != 0);
            CHECK(layer.creator.log.told(place == input_count ? "scores" : input_names[place]));
        }
        for (std::int64_t const extent : {std::numeric_limits<std::int64_t>::min(), std::int64_t{-1}}) {
            auto descs = good;
            descs[place].dims.d[0] = extent;
            CHECK(layer.shape_change(descs) != 0);
            CHECK(layer.creator.log.told("expected"));
        }
    }
    auto const* const descs = good.data();
    CHECK(runtime_of(*layer.plugin).onShapeChange(descs, 8, descs + 8, 1) != 0);
    CHECK(layer.creator.log.told("8 inputs"));
}

TEST(shape, beyond_what_kernels_count_is_refused) {
    auto fields = small_fields();
    Layer small(fields);
    auto const refused = [](Layer& layer, Step const& step, char const* word) {
        CHECK(layer.shape_change(descs_of(layer.fields, step)) != 0);
        CHECK(layer.creator.log.told(word));
        CHECK(layer.configure(profile_of(layer.fields, step)) != 0);
        CHECK(layer.creator.log.told(word));
    };
    refused(small, {65536, 1, 1, 2}, "scoring rows");
    refused(small, {1, 65536, 1, 2}, "sequences");
    refused(small, {1, 1, (1 << 27) + 1, 2}, "blocks hold");  // of 8 rows: 2^30
    refused(small, {1, 1, (1 << 30) + 1, 2}, "blocks");
    refused(small, {1, 1 << 15, 1 << 15, 2}, "block_offsets");  // 2^31 numbers
    refused(small, {1, 1, 1, 1}, "pool 1");
    CHECK_EQUAL(small.shape_change(descs_of(fields, {1, 1, 1 << 27, 2})), 0);
    CHECK_EQUAL(small.shape_change(descs_of(fields, {1, (1 << 15) - 1, 1 << 15, 2})), 0);

    // positions * K * Hq * D of one sequence: 512 * 64 * 64 * 1024 = 2^31.
    fields.query_heads = fields.top_k = 64;
    fields.head_dim = 1024;
    fields.positions = 1000;
    Layer large(fields);
    CHECK_EQUAL(large.shape_change(descs_of(fields, {511, 1, 1, 2})), 0);
    refused(large, {512, 1, 1, 2}, "one sequence");

    fields.query_heads = 32770;  // 65535 rows of so many heads pass 2^31
    fields.top_k = fields.head_dim = fields.positions = 1;
    Layer wide(fields);
    CHECK_EQUAL(wide.shape_change(descs_of(fields, {65529, 1, 1, 2})), 0);
    refused(wide, {65535, 1, 1, 2}, "query heads");
}

TEST(shape, is_configured_where_bounds_allow_it) {
    Layer layer;
    auto const good = profile_of(layer.fields, {});
    CHECK_EQUAL(layer.configure(good), 0);
    auto open = good;  // all unknown, as far as TensorRT's bounds say nothing else
    for (auto& tensor : open) std::fill_n(tensor.desc.dims.d, tensor.desc.dims.nbDims, -1);
    CHECK_EQUAL(layer.configure(open), 0);
    auto loose = good;  // bounds of what is computed may be wider than those of inputs
    loose[input_context].max.d[0] += 7;
    CHECK_EQUAL(layer.configure(loose), 0);
    CHECK_EQUAL(layer.creator.log.take().size(), 0U);

    for (std::int32_t place = 0; place < input_count; ++place) {
        for (std::int32_t axis = 0; axis < good[place].desc.dims.nbDims; ++axis) {
            bool const fixed = good[place].desc.dims.d[axis] != -1 && !(place == input_pool_addresses && axis == 0) &&
                               !(place == input_block_offsets && axis == 0);
            if (!fixed) continue;
            auto below = open, above = open, known = good;
            below[place].max.d[axis] = good[place].desc.dims.d[axis] - 1;
            above[place].min.d[axis] = good[place].desc.dims.d[axis] + 1;
            known[place].desc.dims.d[axis] += 1;
            for (auto const& wrong : {below, above, known}) {
                CHECK(layer.configure(wrong) != 0);
                CHECK(layer.creator.log.told(input_names[place], "expected"));
            }
        }
    }
    auto two_sizes = good;
    two_sizes[input_q].desc.dims.d[0] = 4;
    two_sizes[input_p].desc.dims.d[0] = 5;
    CHECK(layer.configure(two_sizes) != 0);
    CHECK(layer.creator.log.told("(p)"));
}

TEST(shape, is_not_configured_without_kernels) {
    Creator creator;
    auto const plugin = creator.make(field_list(small_fields()));
    auto const descs = profile_of(small_fields(), {});
    CHECK(build_of(*plugin).configurePlugin(descs.data(), input_count, descs.data() + input_count, 1) != 0);
    CHECK(creator.log.told("no layer carries"));
    CHECK_EQUAL(build_of(*plugin).getWorkspaceSize(descs.data(), input_count, descs.data() + input_count, 1),
                static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()));
    CHECK(creator.log.told("no layer carries"));
}
