#include <algorithm>

#include "check.h"
#include "kernel_bundle.h"
#include "layer.h"
#include "refusal.h"

using namespace bpkv;
using namespace bpkv::test;

namespace {

std::string refusal_of(std::string const& bytes) {
    try {
        KernelBundle const bundle(bytes);
        return "";
    } catch (Refusal const& refusal) {
        return refusal.what();
    }
}

#define CHECK_REFUSED(bundle, word)                                        \
    do {                                                                   \
        auto const why = refusal_of((bundle).bytes());                     \
        if (why.find(word) == std::string::npos) CHECK_EQUAL(why, (word)); \
    } while (false)

Bundle whole() { return bundle_for(small_fields(), {"80", "86", "90a"}); }

}  // namespace

TEST(bundle, is_read_back_as_it_was_written) {
    auto made = whole();
    for (auto& record : made.records) std::reverse(record.arguments.begin(), record.arguments.end());
    KernelBundle const bundle(made.bytes());
    CHECK_EQUAL(bundle.rows_per_split(), 512);
    CHECK_EQUAL(bundle.most_splits(), 128);
    auto const fields = small_fields();
    expect_equal(bundle.geometry(), fields);
    auto const& target = bundle.for_device({8, 9});
    CHECK(target.target == (Target{8, 6, false}));
    CHECK((target.blocks == std::vector{1, 2, 4}));
    CHECK_EQUAL(target.kernels.size(), 8U);
    for (auto const& kernel : target.kernels) {
        auto const block = kernel.block ? std::to_string(kernel.block) : "";
        auto const& record = made.find("86", name_of(kernel.name), block);
        CHECK_EQUAL(kernel.threads, record.threads);
        CHECK_EQUAL(kernel.shared_bytes, record.shared_bytes);
        CHECK_EQUAL(kernel.hidden_arguments, record.hidden_arguments);
        CHECK(kernel.image == record.image);
        CHECK_EQUAL((kernel.image.data() - bundle.bytes().data()) % 16, 0);
        CHECK_EQUAL(kernel.arguments.size(), record.arguments.size());
        for (std::size_t each = 0; each < kernel.arguments.size(); ++each) {
            CHECK(argument_of(kernel.name, record.arguments[each].first) == kernel.arguments[each]);
        }
    }
    CHECK_EQUAL(target.get(ScoreKernel::score_entries, 2).tile, 64);
    CHECK_EQUAL(target.get(ScoreKernel::read_context, 0).tile, 32);
    CHECK_EQUAL(target.get(ScoreKernel::combined_log_sum_exp, 0).columns, 32);
}

TEST(bundle, may_have_constants_that_launching_does_not_take) {
    auto made = whole();
    for (auto& record : made.records) record.constant("OPERANDS") = "bf16";
    CHECK_EQUAL(refusal_of(made.bytes()), "");
}

TEST(bundle, cut_off_anywhere_or_with_a_tail_is_refused) {
    auto const bytes = bundle_for(small_fields(), {"80"}).bytes();
    CHECK(refusal_of(bytes).empty());
    for (std::size_t length = 0; length < bytes.size(); ++length) CHECK(!refusal_of(bytes.substr(0, length)).empty());
    CHECK(!refusal_of(bytes + '\0').empty());
}

TEST(bundle, of_another_form_is_refused) {
    auto bundle = whole();
    bundle.magic = "BPKVKRNM";
    CHECK_REFUSED(bundle, "begin");
    bundle = whole();
    bundle.version = 2;
    CHECK_REFUSED(bundle, "version 2");
    bundle = whole();
    bundle.padding = 'x';
    CHECK_REFUSED(bundle, "padding");
    bundle = whole();
    bundle.constants.clear();
    CHECK_REFUSED(bundle, "rows_per_split");
    bundle = whole();
    bundle.constants.push_back(bundle.constants[0]);
    CHECK_REFUSED(bundle, "twice");
    bundle = whole();
    bundle.records.clear();
    CHECK_REFUSED(bundle, "empty");
    for (auto const* target : {"", "a", "9", "090", "90b", "90 ", "9000", "sm_90", "-90"}) {
        bundle = whole();
        bundle.records[0].target = target;
        CHECK_REFUSED(bundle, "target");
    }
}

TEST(bundle, that_lacks_a_kernel_or_has_one_twice_is_refused) {
    for (std::size_t each = 0; each < whole().records.size(); ++each) {
        auto bundle = whole();
        auto const record = bundle.records[each];
        bundle.records.push_back(record);
        CHECK_REFUSED(bundle, "twice");
        bundle = whole();
        bundle.records.erase(bundle.records.begin() + static_cast<std::ptrdiff_t>(each));
        auto const why = refusal_of(bundle.bytes());
        CHECK(why.find("lack") != std::string::npos && why.find(record.target) != std::string::npos);
    }
    auto bundle = whole();
    bundle.records[0].name = "score_everything";
    CHECK_REFUSED(bundle, "score_everything");
    bundle = bundle_for(small_fields(), {"80"});
    bundle.records.erase(std::remove_if(bundle.records.begin(), bundle.records.end(),
                                        [](auto const& each) { return each.name == "partial_log_sum_exp"; }),
                         bundle.records.end());
    CHECK_REFUSED(bundle, "partial_log_sum_exp");
}

TEST(bundle, with_other_arguments_was_built_for_other_kernels) {
    for (std::size_t each = 0; each < whole().records.size(); ++each) {
        for (std::size_t place = 0; place < whole().records[each].arguments.size(); ++place) {
            auto const change = [&](auto const& action) {
                auto bundle = whole();
                auto& arguments = bundle.records[each].arguments;
                action(arguments, arguments[place]);
                CHECK_REFUSED(bundle, "other kernels");
            };
            change([](auto&, auto& argument) { argument.first += "_"; });
            change([](auto&, auto& argument) { argument.second = "*u8"; });
            change([](auto&, auto& argument) { argument.second = argument.second.substr(1); });
            change([&](auto& all, auto&) { all.erase(all.begin() + static_cast<std::ptrdiff_t>(place)); });
            change([](auto& all, auto const argument) { all.push_back(argument); });
        }
    }
    auto bundle = whole();
    bundle.find("80", "read_context").type("context") = "*fp32";
    CHECK_REFUSED(bundle, "activations");
}

TEST(bundle, whose_kernels_differ_in_the_model_is_refused) {
    for (auto const& [kernel, constants] : std::vector<std::pair<char const*, std::vector<char const*>>>{
             {"partial_log_sum_exp", {"D", "KV_HEADS", "GROUP", "PAGE_SIZE", "PAGE_HEADS", "CACHE", "BLOCK"}},
             {"combined_log_sum_exp", {"SPLITS", "COLUMNS"}},
             {"read_context", {"D", "HEADS", "CHANNELS", "TILE"}},
             {"score_entries",
              {"D", "KV_HEADS", "GROUP", "PAGE_SIZE", "PAGE_HEADS", "CACHE", "CHANNELS", "BLOCK", "TILE"}}}) {
        for (std::string const constant : constants) {
            for (auto const* value : {"", "0", "-1", "None", "1.0", "2147483648", "99999999999999999999", " 4"}) {
                auto bundle = whole();
                bundle.find("86", kernel).constant(constant) = value;
                CHECK(!refusal_of(bundle.bytes()).empty());
            }
            auto lacking = whole();
            auto& list = lacking.find("86", kernel).constants;
            list.erase(
                std::find_if(list.begin(), list.end(), [&](auto const& each) { return each.first == constant; }));
            CHECK_REFUSED(lacking, constant);
            bool const of_model =
                constant != "BLOCK" && constant != "TILE" && constant != "SPLITS" && constant != "COLUMNS";
            auto other = whole();
            other.find("86", kernel).constant(constant) = constant == "CACHE" ? "int8" : "3";
            if (of_model && constant != "GROUP") CHECK(!refusal_of(other.bytes()).empty());
        }
    }
    auto bundle = whole();
    bundle.find("80", "score_entries").constant("GROUP") = "2";
    CHECK_REFUSED(bundle, "query_heads");
}

TEST(bundle, whose_kernels_differ_in_soft_cap_or_readout_is_refused) {
    auto const changed = [](std::string const& constant, auto const& change) {
        for (std::size_t each = 0; each < whole().records.size(); ++each) {
            auto bundle = whole();
            auto& list = bundle.records[each].constants;
            auto const found =
                std::find_if(list.begin(), list.end(), [&](auto const& pair) { return pair.first == constant; });
            if (found == list.end()) continue;
            change(list, found);
            CHECK_REFUSED(bundle, constant);
        }
    };
    for (std::string const constant : {"SOFTCAP", "PROBES"}) {
        changed(constant, [](auto&, auto const& pair) { pair->second = pair->second == "None" ? "30.0" : "True"; });
        changed(constant, [](auto& list, auto const& pair) { list.erase(pair); });
    }
    auto capped = whole(), probing = whole();
    for (auto const* block : {"1", "2", "4"}) {
        for (auto const* target : {"80", "86", "90a"}) {
            for (auto const* kernel : {"partial_log_sum_exp", "score_entries"}) {
                capped.find(target, kernel, block).constant("SOFTCAP") = "30.0";
            }
            probing.find(target, "score_entries", block).constant("PROBES") = "True";
        }
    }
    CHECK_EQUAL(refusal_of(capped.bytes()), "");
    CHECK_EQUAL(refusal_of(probing.bytes()), "");
}

TEST(bundle, with_a_kernel_that_cannot_be_launched_is_refused) {
    for (std::uint32_t const threads : {0U, 1025U, 0xFFFFFFFFU}) {
        auto bundle = whole();
        bundle.records[0].threads = threads;
        CHECK_REFUSED(bundle, "threads");
    }
    auto bundle = whole();
    bundle.records[1].shared_bytes = 0x80000000U;
    CHECK_REFUSED(bundle, "shared");
    bundle = whole();
    bundle.records[1].hidden_arguments = 9;
    CHECK_REFUSED(bundle, "hidden");
    bundle = whole();
    bundle.records[1].image.clear();
    CHECK_REFUSED(bundle, "image");
}

TEST(bundle, for_another_model_is_refused_when_it_is_carried) {
    auto const fields = small_fields();
    auto const differ = [&](auto const& change, char const* name) {
        auto other = fields;
        change(other);
        Creator creator;
        CHECK(creator.make(field_list(fields, bundle_for(other, {"80"}).bytes())) == nullptr);
        CHECK(creator.log.told(name));
    };
    differ([](auto& each) { each.head_dim = 32; }, "head_dim");
    differ([](auto& each) { each.kv_heads = 3; }, "kv_heads");
    differ([](auto& each) { each.query_heads = 8; }, "query_heads");
    differ([](auto& each) { each.tokens_per_block = 16; }, "tokens_per_block");
    differ([](auto& each) { each.top_k = 6; }, "top_k");
    differ([](auto& each) { each.cache = NumberType::int8; }, "cache");
    differ([](auto& each) { each.activations = NumberType::bf16; }, "activations");
}

TEST(bundle, of_another_checksum_is_refused) {
    auto const kernels = whole().bytes();
    auto list = field_list(small_fields(), kernels);
    list.set("kernels_checksum", checksum_of(kernels) + 1);
    Creator creator;
    CHECK(creator.make(list) == nullptr);
    CHECK(creator.log.told("checksum"));
    auto damaged = field_list(small_fields(), kernels);
    damaged["kernels"].data[kernels.size() - 1] ^= 1;
    CHECK(creator.make(damaged) == nullptr);
    CHECK(creator.log.told("checksum"));
}

TEST(bundle, checksum_is_fnv_1a) {
    // From the tables of the function's authors.
    CHECK_EQUAL(static_cast<std::uint64_t>(checksum_of("")), 0xcbf29ce484222325U);
    CHECK_EQUAL(static_cast<std::uint64_t>(checksum_of("a")), 0xaf63dc4c8601ec8cU);
    CHECK_EQUAL(static_cast<std::uint64_t>(checksum_of("foobar")), 0x85944171f73967e8U);
    CHECK(checksum_of("\x80") != checksum_of("\x7f"));
}
