#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "geometry.h"

namespace bpkv::test {

using Pairs = std::vector<std::pair<std::string, std::string>>;

/// A bundle as bpkv_trt writes it; tests change a part of it before it is written.
struct Bundle {
    struct Record {
        std::string target, name;
        std::uint32_t threads = 128, shared_bytes = 0, hidden_arguments = 2;
        Pairs arguments, constants;
        std::string image;

        std::string& constant(std::string const& wanted) {
            for (auto& [known, value] : constants) {
                if (known == wanted) return value;
            }
            return constants.emplace_back(wanted, "").second;
        }
        std::string& type(std::string const& wanted) {
            for (auto& [known, value] : arguments) {
                if (known == wanted) return value;
            }
            return arguments.emplace_back(wanted, "").second;
        }
    };

    std::string magic = "BPKVKRNL";
    std::uint32_t version = 1;
    Pairs constants{{"rows_per_split", "512"}};
    std::vector<Record> records;
    std::string tail;
    char padding = '\0';

    std::string bytes() const {
        std::string out = magic;
        number(out, version, 4);
        pairs(out, constants);
        number(out, records.size(), 4);
        for (auto const& record : records) {
            name(out, record.target);
            name(out, record.name);
            number(out, record.threads, 4);
            number(out, record.shared_bytes, 4);
            number(out, record.hidden_arguments, 4);
            pairs(out, record.arguments);
            pairs(out, record.constants);
            number(out, record.image.size(), 8);
            while (out.size() % 16 != 0) out += padding;
            out += record.image;
        }
        return out + tail;
    }

    Record& find(std::string const& target, std::string const& name, std::string const& block = "") {
        for (auto& record : records) {
            if (record.target == target && record.name == name &&
                (block.empty() || record.constant("BLOCK") == block)) {
                return record;
            }
        }
        throw std::runtime_error("no such record: " + name);
    }

private:
    static void number(std::string& out, std::uint64_t value, int count) {
        for (int each = 0; each < count; ++each) out += static_cast<char>(value >> 8 * each);
    }
    static void name(std::string& out, std::string const& text) {
        number(out, text.size(), 4);
        out += text;
    }
    static void pairs(std::string& out, Pairs const& list) {
        number(out, list.size(), 4);
        for (auto const& [first, second] : list) {
            name(out, first);
            name(out, second);
        }
    }
};

/// Tiles and the like, small so that numbers of programs differ from each other.
struct Tiles {
    std::vector<int> blocks{1, 2, 4};
    int splits = 128, columns = 32, context_tile = 32, score_tile = 64, rows_per_split = 512;
};

/// Complete for every target; images differ from each other.
inline Bundle bundle_for(Geometry const& model, std::vector<std::string> const& targets, Tiles const& tiles = {}) {
    auto const number = [](int value) { return std::to_string(value); };
    auto const a = std::string("*") + name_of(model.activations);
    Pairs const cache{{"KV_HEADS", number(model.kv_heads)},
                      {"GROUP", number(model.group())},
                      {"PAGE_HEADS", number(model.kv_heads)},
                      {"PAGE_SIZE", number(model.tokens_per_block)},
                      {"D", number(model.head_dim)},
                      {"CACHE", name_of(model.cache)},
                      {"SOFTCAP", "None"}};
    auto const with = [](Pairs list, Pairs const& more) {
        list.insert(list.end(), more.begin(), more.end());
        return list;
    };
    Pairs const strides{{"sequence_stride", "i32"},    {"head_stride", "i32"}, {"length_sequence_stride", "i32"},
                        {"length_head_stride", "i32"}, {"first_page", "i32"},  {"window", "i32"}};
    Bundle bundle;
    bundle.constants = {{"rows_per_split", number(tiles.rows_per_split)}};
    auto const add = [&](std::string const& target, char const* name, int threads, int shared, Pairs const& arguments,
                         Pairs const& constants) {
        auto const image = "image " + target + " " + name + " " + number(static_cast<int>(bundle.records.size()));
        bundle.records.push_back({target, name, static_cast<std::uint32_t>(threads), static_cast<std::uint32_t>(shared),
                                  2, arguments, constants, image});
    };
    for (auto const& target : targets) {
        for (auto const block : tiles.blocks) {
            auto const positions = Pairs{{"BLOCK", number(block)}};
            add(target, "partial_log_sum_exp", 128, 65536,
                with(with({{"q", a},
                           {"offsets", "*i32"},
                           {"addresses", "*i64"},
                           {"key_pages", "*i32"},
                           {"lengths", "*i32"},
                           {"rows", "i32"},
                           {"blocks", "i32"}},
                          strides),
                     {{"scale", "fp32"}, {"partials", "*fp32"}}),
                with(cache, positions));
            add(target, "score_entries", 256, 49152,
                with(with({{"q", a},
                           {"readout", a},
                           {"context_read", "*fp32"},
                           {"p", "*fp32"},
                           {"weights", "*fp32"},
                           {"offsets", "*i32"},
                           {"addresses", "*i64"},
                           {"key_pages", "*i32"},
                           {"value_pages", "*i32"},
                           {"lengths", "*i32"},
                           {"lse", "*fp32"}},
                          strides),
                     {{"longest", "i32"}, {"scale", "fp32"}, {"value_scale", "fp32"}, {"scores", "*fp32"}}),
                with(with(cache, positions),
                     {{"CHANNELS", number(model.top_k)}, {"TILE", number(tiles.score_tile)}, {"PROBES", "False"}}));
        }
        add(target, "combined_log_sum_exp", 128, 0,
            {{"partials", "*fp32"}, {"splits", "i32"}, {"columns", "i32"}, {"result", "*fp32"}},
            {{"SPLITS", number(tiles.splits)}, {"COLUMNS", number(tiles.columns)}});
        add(target, "read_context", 128, 1024, {{"context", a}, {"readout", a}, {"result", "*fp32"}},
            {{"HEADS", number(model.query_heads)},
             {"CHANNELS", number(model.top_k)},
             {"D", number(model.head_dim)},
             {"TILE", number(tiles.context_tile)}});
    }
    return bundle;
}

}  // namespace bpkv::test
