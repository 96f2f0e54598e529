#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "check.h"
#include "layer.h"
#include "score_launches.h"
#include "score_workspace.h"
#include "stand_in.h"

using namespace bpkv;
using namespace bpkv::test;

namespace {

/// How many programs of `size` cover `count`, by laying them out one by one.
std::int64_t covering(std::int64_t count, std::int64_t size) {
    std::int64_t programs = 0;
    for (std::int64_t covered = 0; covered < count; covered += size) ++programs;
    return programs;
}

/// One launch as the driver got it.
struct Seen {
    std::string kernel, image;
    unsigned grid[3], threads, shared_bytes;
    void* stream;
    std::map<std::string, std::uint64_t> values;  // by name; pointers, or the bits of numbers
};

std::vector<Seen> seen;
Bundle* given_bundle = nullptr;

int keep(void const* image, char const* kernel, int, unsigned grid[3], unsigned threads, unsigned shared_bytes,
         void* stream, void** arguments) {
    for (auto const& record : given_bundle->records) {
        if (record.name != kernel || std::memcmp(record.image.data(), image, record.image.size()) != 0) continue;
        Seen launch{kernel, record.image, {grid[0], grid[1], grid[2]}, threads, shared_bytes, stream, {}};
        std::size_t place = 0;
        for (auto const& [name, type] : record.arguments) {
            std::uint64_t value = 0;
            std::memcpy(&value, arguments[place++], type[0] == '*' ? 8 : 4);
            launch.values[name] = value;
        }
        for (unsigned each = 0; each < record.hidden_arguments; ++each) {
            void* hidden = &hidden;
            std::memcpy(&hidden, arguments[place++], sizeof hidden);
            CHECK(hidden == nullptr);
        }
        seen.push_back(launch);
        return 0;
    }
    return 1;
}

std::uint64_t bits(float value) {
    std::uint32_t result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

std::uint64_t address(void const* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

TEST(launches, are_those_of_a_case_worked_out_by_hand) {
    ScoreFields fields = small_fields();
    fields.query_heads = 32;
    fields.kv_heads = 8;
    fields.head_dim = 128;
    fields.tokens_per_block = 64;
    fields.top_k = 33;
    fields.positions = 40;
    Tiles tiles;
    tiles.blocks = {4, 8, 16};
    tiles.score_tile = 128;
    KernelBundle const bundle(bundle_for(fields, {"90a"}, tiles).bytes());
    auto const& target = bundle.for_device({9, 0});

    // 70 rows of 3 sequences: 24 on average, more than the largest block; 40 at most, 3 blocks of 16.
    // 65 blocks of 64 rows: 4160, 9 splits of 512.
    ScoreLaunches const launches(fields, {70, 3, 65, 4160}, target, bundle.rows_per_split());
    CHECK_EQUAL(launches.blocks, 3);
    CHECK_EQUAL(launches.splits, 9);
    auto const expect = [&](std::size_t place, ScoreKernel kernel, int block, Grid const& grid) {
        auto const& launch = launches.list[place];
        CHECK(launch.kernel == kernel);
        CHECK_EQUAL(launch.block, block);
        CHECK_EQUAL(launch.grid.x, grid.x);
        CHECK_EQUAL(launch.grid.y, grid.y);
        CHECK_EQUAL(launch.grid.z, grid.z);
    };
    expect(0, ScoreKernel::partial_log_sum_exp, 16, {27, 8, 3});
    expect(1, ScoreKernel::combined_log_sum_exp, 0, {70, 1, 1});  // 70 * 32 columns, 32 at a time
    expect(2, ScoreKernel::read_context, 0, {33, 70, 1});         // 33 * 32 pairs, 32 at a time
    expect(3, ScoreKernel::score_entries, 16, {33, 8, 3});        // 4160 / 128 is 32.5

    // One row of one sequence in the longest cache: the smallest block, and no more splits than there can be.
    ScoreLaunches const one(fields, {1, 1, 4096, 262144}, target, bundle.rows_per_split());
    CHECK_EQUAL(one.list[0].block, 4);
    CHECK_EQUAL(one.blocks, 1);
    CHECK_EQUAL(one.splits, 128);
    CHECK_EQUAL(one.list[0].grid.x, 128U);
    CHECK_EQUAL(one.list[3].grid.x, 2048U);
}

TEST(launches, cover_all_and_no_more_for_any_sizes) {
    std::mt19937 random(1);
    auto const from = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    for (int round = 0; round < 2000; ++round) {
        ScoreFields fields = small_fields();
        fields.kv_heads = from(1, 8);
        fields.query_heads = fields.kv_heads * from(1, 8);
        fields.top_k = from(1, 40);
        fields.positions = from(1, 70);
        fields.tokens_per_block = 1 << from(0, 7);
        Tiles tiles{{}, 1 << from(0, 7), 1 << from(3, 6), 1 << from(3, 6), 1 << from(4, 7), from(1, 700)};
        for (int block = 1; block <= 64; block *= 2) {
            if (from(0, 1) || (block == 64 && tiles.blocks.empty())) tiles.blocks.push_back(block);
        }
        KernelBundle const bundle(bundle_for(fields, {"80"}, tiles).bytes());
        std::int64_t const rows = from(1, 100), sequences = from(1, 20), blocks = from(1, 60);
        ScoreShape const shape{rows, sequences, blocks, blocks * fields.tokens_per_block};
        ScoreLaunches const launches(fields, shape, bundle.for_device({8, 0}), bundle.rows_per_split());

        auto const average = covering(rows, sequences);
        auto block = tiles.blocks[0];
        for (auto const each : tiles.blocks) {
            if (block < average) block = each;
        }
        auto const bound = std::min<std::int64_t>(rows, fields.positions);
        auto const splits = std::min<std::int64_t>(tiles.splits, covering(shape.capacity, tiles.rows_per_split));
        CHECK_EQUAL(launches.list[0].block, block);
        CHECK_EQUAL(launches.list[3].block, block);
        CHECK_EQUAL(launches.blocks, covering(bound, block));
        CHECK_EQUAL(launches.splits, splits);
        CHECK_EQUAL(launches.list[0].grid.x, covering(bound, block) * splits);
        CHECK_EQUAL(launches.list[1].grid.x, covering(rows * fields.query_heads, tiles.columns));
        CHECK_EQUAL(launches.list[2].grid.x,
                    covering(std::int64_t{fields.top_k} * fields.query_heads, tiles.context_tile));
        CHECK_EQUAL(launches.list[2].grid.y, rows);
        CHECK_EQUAL(launches.list[3].grid.x, covering(shape.capacity, tiles.score_tile));
        for (auto const place : {0, 3}) {
            CHECK_EQUAL(launches.list[place].grid.y, static_cast<unsigned>(fields.kv_heads));
            CHECK_EQUAL(launches.list[place].grid.z, static_cast<unsigned>(sequences));
        }
    }
}

TEST(launches, hand_every_kernel_its_arguments_by_name) {
    StandIn const stand_in;
    auto const fields = small_fields();
    auto bundle = bundle_for(fields, {"90a"});
    std::mt19937 random(2);
    for (auto& record : bundle.records) {  // of another number of hidden ones each, in any order
        std::shuffle(record.arguments.begin(), record.arguments.end(), random);
        record.hidden_arguments = random() % 4;
    }
    Creator creator;
    auto const plugin = creator.make(field_list(fields, bundle.bytes()));
    given_bundle = &bundle;
    seen.clear();
    stand_in_set_launch(keep);
    Step const step{5, 2, 7, 2};
    Memory const memory;
    CHECK_EQUAL(enqueue(*plugin, fields, step, memory), 0);
    CHECK_EQUAL(creator.log.take().size(), 0U);
    CHECK_EQUAL(seen.size(), 4U);

    // S 5, B 2, P 7, Hq 6, K 5; 7 blocks of 8 rows are 1 split; partials and lse 120 bytes each.
    auto const at = [&](Input input) { return address(memory.inputs[input]); };
    auto const scratch = address(memory.workspace);
    std::map<std::string, std::uint64_t> const common{
        {"q", at(input_q)},
        {"context", at(input_context)},
        {"readout", at(input_readout)},
        {"p", at(input_p)},
        {"weights", at(input_weights)},
        {"offsets", at(input_offsets)},
        {"addresses", at(input_pool_addresses) + 2 * 8},             // of pool 1
        {"key_pages", at(input_block_offsets) + 1 * 2 * 2 * 7 * 4},  // of pool 1
        {"value_pages", at(input_block_offsets) + (1 * 2 * 2 * 7 + 7) * 4},
        {"lengths", at(input_lengths)},
        {"partials", scratch},
        {"lse", scratch + 256},
        {"context_read", scratch + 512},
        {"scores", address(memory.outputs[0])},
        {"rows", 5},
        {"columns", 30},
        {"blocks", 1},
        {"splits", 1},
        {"sequence_stride", 14},
        {"head_stride", 0},
        {"length_sequence_stride", 1},
        {"length_head_stride", 0},
        {"first_page", 6},
        {"window", 56},
        {"longest", 56},
        {"scale", bits(0.75F)},
        {"value_scale", bits(0.5F)},
    };
    for (auto const& launch : seen) {
        CHECK_EQUAL(launch.values.size(), arguments_of(*score_kernel(launch.kernel)));
        for (auto const& [name, value] : launch.values) {
            if (name == "result") {
                CHECK_EQUAL(value, scratch + (launch.kernel == "combined_log_sum_exp" ? 256 : 512));
            } else if (value != common.at(name)) {
                CHECK_EQUAL(launch.kernel + " " + name, "as expected");
            }
        }
        auto const block = has_blocks(*score_kernel(launch.kernel)) ? "4" : "";  // 3 rows on average
        auto const& record = bundle.find("90a", launch.kernel, block);
        CHECK_EQUAL(launch.image, record.image);
        CHECK_EQUAL(launch.threads, record.threads);
        CHECK_EQUAL(launch.shared_bytes, record.shared_bytes);
        CHECK(launch.stream == memory.stream);
    }
    CHECK_EQUAL(seen[0].kernel, "partial_log_sum_exp");
    CHECK_EQUAL(seen[1].kernel, "combined_log_sum_exp");
    CHECK_EQUAL(seen[2].kernel, "read_context");
    CHECK_EQUAL(seen[3].kernel, "score_entries");
}

TEST(launches, read_the_blocks_and_addresses_of_the_layer_s_own_pool) {
    for (int const pool : {0, 1, 2}) {
        StandIn const stand_in;
        auto fields = small_fields();
        fields.pool = pool;
        auto bundle = bundle_for(fields, {"90a"});
        Creator creator;
        auto const plugin = creator.make(field_list(fields, bundle.bytes()));
        given_bundle = &bundle;
        seen.clear();
        stand_in_set_launch(keep);
        Memory const memory;
        CHECK_EQUAL(enqueue(*plugin, fields, {5, 2, 7, 3}, memory), 0);
        CHECK_EQUAL(seen.size(), 4U);
        auto const pages = address(memory.inputs[input_block_offsets]) + pool * 2 * 2 * 7 * 4;  // [pools, 2, 2, 7]
        auto const addresses = address(memory.inputs[input_pool_addresses]) + pool * 2 * 8;     // [pools, 2]
        for (auto const place : {0, 3}) {
            CHECK_EQUAL(seen[place].values.at("key_pages"), pages);
            CHECK_EQUAL(seen[place].values.at("addresses"), addresses);
        }
        CHECK_EQUAL(seen[3].values.at("value_pages"), pages + 7 * 4);
    }
}

TEST(launches, are_none_while_an_engine_is_built) {
    StandIn const stand_in;
    auto const fields = small_fields();
    Creator creator;
    auto const plugin =
        creator.make(field_list(fields, bundle_for(fields, {"90a"}).bytes()), nvinfer1::TensorRTPhase::kBUILD);
    std::unique_ptr<nvinfer1::IPluginV3> const clone(plugin->clone());
    std::unique_ptr<nvinfer1::IPluginV3> const attached(runtime_of(*clone).attachToContext(nullptr));
    Memory nothing;
    nothing.inputs.fill(nullptr);
    nothing.inputs[input_block_offsets] = reinterpret_cast<void const*>(0x1001);
    nothing.outputs[0] = nothing.workspace = nullptr;
    stand_in_fail("cuInit", 100);  // nor is a driver looked for
    for (auto* each : {plugin.get(), clone.get(), attached.get()}) {
        CHECK_EQUAL(enqueue(*each, fields, {5, 2, 7, 2}, nothing), 0);
        CHECK_EQUAL(enqueue(*each, fields, {9, 2, 7, 2}, nothing), 0);  // more than 2 sequences of 4 positions have
        CHECK_EQUAL(creator.log.take().size(), 0U);
        CHECK(enqueue(*each, fields, {5, 2, 7, 1}, nothing) != 0);
        CHECK(creator.log.told("pool 1"));
    }
    CHECK_EQUAL(stand_in_count("launches"), 0);
    CHECK_EQUAL(stand_in_count("loads"), 0);
    stand_in_fail("cuInit", 0);
    std::unique_ptr<nvinfer1::IPluginV3> const running(creator.creator.createPlugin(
        "", runtime_of(*plugin).getFieldsToSerialize(), nvinfer1::TensorRTPhase::kRUNTIME));
    CHECK_EQUAL(enqueue(*running, fields, {5, 2, 7, 2}), 0);
    CHECK_EQUAL(stand_in_count("launches"), 4);
}

TEST(launches, are_none_where_nothing_is_scored) {
    StandIn const stand_in;
    auto const fields = small_fields();
    Creator creator;
    auto const plugin = creator.make(field_list(fields, bundle_for(fields, {"90a"}).bytes()));
    for (Step const step : {Step{0, 2, 7, 2}, Step{5, 2, 0, 2}, Step{0, 0, 0, 2}}) {
        CHECK_EQUAL(enqueue(*plugin, fields, step), 0);
    }
    CHECK_EQUAL(stand_in_count("launches"), 0);
    CHECK_EQUAL(stand_in_count("loads"), 0);
}

TEST(launches, are_refused_without_memory_or_for_shapes_that_do_not_fit) {
    StandIn const stand_in;
    auto const fields = small_fields();
    Creator creator;
    auto const plugin = creator.make(field_list(fields, bundle_for(fields, {"90a"}).bytes()));
    for (std::int32_t place = 0; place < input_count + 2; ++place) {
        for (auto const* wrong : {static_cast<char const*>(nullptr), reinterpret_cast<char const*>(0x1008)}) {
            Memory memory;
            auto* const pointer = const_cast<char*>(wrong);
            if (place < input_count) memory.inputs[place] = pointer;
            if (place == input_count) memory.outputs[0] = pointer;
            if (place > input_count) memory.workspace = pointer;
            CHECK(enqueue(*plugin, fields, {}, memory) != 0);
            CHECK(creator.log.told(place < input_count    ? input_names[place]
                                   : place == input_count ? "scores"
                                                          : "workspace"));
        }
    }
    CHECK(enqueue(*plugin, fields, {9, 2, 7, 2}) != 0);  // 2 sequences of 4 positions each
    CHECK(creator.log.told("9 rows"));
    CHECK(enqueue(*plugin, fields, {5, 2, 7, 1}) != 0);
    CHECK(creator.log.told("pool 1"));
    CHECK_EQUAL(stand_in_count("launches"), 0);
    CHECK_EQUAL(enqueue(*plugin, fields, {8, 2, 7, 2}), 0);
}

TEST(workspace, holds_all_parts_apart_and_grows_with_each_size) {
    std::mt19937 random(3);
    auto const from = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    for (int round = 0; round < 300; ++round) {
        auto fields = small_fields();
        fields.top_k = from(1, 40);
        std::int64_t const rows = from(0, 90), splits = from(1, 130);
        ScoreWorkspace const places(fields, {rows, 1, 1, 8}, static_cast<std::int32_t>(splits));
        auto const pairs = static_cast<std::size_t>(rows) * 6 * 4;
        CHECK_EQUAL(places.partials, 0U);
        CHECK(places.lse >= pairs * splits && places.lse < pairs * splits + 256 && places.lse % 256 == 0);
        CHECK(places.context_read >= places.lse + pairs && places.context_read % 256 == 0);
        CHECK(places.bytes >= places.context_read + pairs * fields.top_k);
        CHECK(places.bytes < pairs * (splits + 1 + fields.top_k) + 3 * 256);
    }
    auto const fields = small_fields();
    Creator creator;
    Tiles tiles;
    tiles.rows_per_split = 16;
    auto const plugin = creator.make(field_list(fields, bundle_for(fields, {"80", "90a"}, tiles).bytes()));
    auto const size = [&](Step const& step) {
        auto const descs = profile_of(fields, step);
        return build_of(*plugin).getWorkspaceSize(descs.data(), input_count, descs.data() + input_count, 1);
    };
    // 7 blocks of 8 rows are 4 splits of 16: 480 bytes; lse 120, context_read 600.
    CHECK_EQUAL(size({5, 2, 7, 2}), 512U + 256U + 768U);
    CHECK_EQUAL(size({0, 2, 7, 2}), 0U);
    for (int round = 0; round < 300; ++round) {
        Step const small{from(0, 60), from(1, 9), from(0, 500), 2};
        Step large = small;
        (round % 3 == 0 ? large.rows : round % 3 == 1 ? large.sequences : large.blocks) += from(0, 40);
        CHECK(size(small) <= size(large));
    }
}

TEST(workspace, is_enough_for_whichever_target_cuts_the_cache_most) {
    auto const fields = small_fields();
    Tiles tiles;
    tiles.rows_per_split = 16;
    tiles.splits = 1;
    std::vector<std::string> const targets{"80", "86", "90a"};
    for (auto const& most : targets) {
        auto bundle = bundle_for(fields, targets, tiles);
        bundle.find(most, "combined_log_sum_exp").constant("SPLITS") = "4";
        Creator creator;
        auto const plugin = creator.make(field_list(fields, bundle.bytes()));
        auto const descs = profile_of(fields, {5, 2, 7, 2});
        CHECK_EQUAL(build_of(*plugin).getWorkspaceSize(descs.data(), input_count, descs.data() + input_count, 1),
                    512U + 256U + 768U);  // 4 splits, as above
    }
}
