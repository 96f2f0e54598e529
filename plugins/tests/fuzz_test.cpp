// Damaged fields and kernels, made from good ones: every one is either taken, or refused with a line in the log.

#include <algorithm>
#include <cstdlib>
#include <random>

#include "check.h"
#include "layer.h"
#include "stand_in.h"

using namespace bpkv;
using namespace bpkv::test;

namespace {

int iterations() {
    auto const* const given = std::getenv("BPKV_FUZZ_ITERATIONS");
    return given == nullptr ? 20000 : std::atoi(given);
}

class Fuzzer {
public:
    explicit Fuzzer(unsigned seed) : random_(seed) {}

    std::size_t below(std::size_t count) { return count == 0 ? 0 : random_() % count; }

    /// Numbers at which counts and lengths tend to break.
    std::uint32_t number() {
        static constexpr std::uint32_t edges[] = {0,   1,     2,     15,         16,         255,
                                                  256, 65535, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
        return below(2) ? edges[below(std::size(edges))] : static_cast<std::uint32_t>(random_());
    }

    void damage(std::string& bytes) {
        if (bytes.empty()) return;
        switch (below(7)) {
            case 0: bytes.resize(below(bytes.size())); break;
            case 1: bytes[below(bytes.size())] ^= static_cast<char>(1 << below(8)); break;
            case 2: overwrite(bytes); break;
            case 3: bytes.insert(below(bytes.size()), std::string(below(20), static_cast<char>(random_()))); break;
            case 4: bytes.erase(below(bytes.size()), 1 + below(20)); break;
            case 5: {  // a part of it once more, elsewhere
                auto const part = bytes.substr(below(bytes.size()), below(200));
                bytes.insert(below(bytes.size()), part);
                break;
            }
            default: std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<char>(random_()); });
        }
    }

    void damage(FieldList& list) {
        auto& field = *std::next(list.fields.begin(), static_cast<std::ptrdiff_t>(below(list.fields.size())));
        auto const room = static_cast<std::int32_t>(field.data.size());
        switch (below(9)) {
            case 0: field.type = static_cast<nvinfer1::PluginFieldType>(static_cast<int>(below(16)) - 1); break;
            case 1: field.length = -static_cast<std::int32_t>(below(3)); break;
            case 2: field.length = static_cast<std::int32_t>(below(static_cast<std::size_t>(room) + 1)); break;
            case 3: field.name = std::string(below(40), static_cast<char>(1 + below(255))); break;
            case 4: field.has_data = false; break;
            case 5: field.has_name = false; break;
            case 6: list.fields.push_back(field); break;
            case 7: list.fields.remove_if([&](auto const& each) { return &each == &field; }); break;
            default:
                if (field.name == "kernels") break;
                for (auto& each : field.data) each = static_cast<char>(number());
        }
    }

private:
    void overwrite(std::string& bytes) {
        auto const value = number();
        auto const begin = below(bytes.size());
        for (std::size_t each = 0; each < 4 && begin + each < bytes.size(); ++each) {
            bytes[begin + each] = static_cast<char>(value >> 8 * each);
        }
    }

    std::mt19937 random_;
};

/// Create, and if that works, use and end it.
bool is_taken(Creator& creator, FieldList& list, ScoreFields const& fields) {
    auto* const made = creator.creator.createPlugin("", list.collection(), nvinfer1::TensorRTPhase::kRUNTIME);
    std::unique_ptr<nvinfer1::IPluginV3> const plugin(made);
    auto const lines = creator.log.take();
    CHECK_EQUAL(lines.size(), plugin == nullptr ? 1U : 0U);
    if (plugin == nullptr) return false;
    enqueue(*plugin, fields, {});
    std::unique_ptr<nvinfer1::IPluginV3> const clone(plugin->clone());
    auto const* const again = runtime_of(*clone).getFieldsToSerialize();
    std::unique_ptr<nvinfer1::IPluginV3> const second(
        creator.creator.createPlugin("", again, nvinfer1::TensorRTPhase::kRUNTIME));
    CHECK(second != nullptr);
    creator.log.take();
    return true;
}

}  // namespace

TEST(fuzz, damaged_kernels_are_taken_or_refused) {
    StandIn const stand_in;
    auto const fields = small_fields();
    auto const good = bundle_for(fields, {"80", "90a"}).bytes();
    Creator creator;
    Fuzzer fuzzer(5);
    int taken = 0;
    for (int round = 0; round < iterations(); ++round) {
        auto bytes = good;
        for (auto times = 1 + fuzzer.below(3); times > 0; --times) fuzzer.damage(bytes);
        if (bytes.empty()) continue;
        auto list = field_list(fields, bytes);  // with the checksum of what is damaged: the parser has to see it
        taken += is_taken(creator, list, fields);
    }
    std::cout << "        " << iterations() << " bundles, " << taken << " taken\n";
    CHECK(taken > 0 && taken < iterations() / 2);
    CHECK_EQUAL(stand_in.live(), 0);
}

TEST(fuzz, damaged_fields_are_taken_or_refused) {
    StandIn const stand_in;
    auto const fields = small_fields();
    auto const kernels = bundle_for(fields, {"80", "90a"}).bytes();
    Creator creator;
    Fuzzer fuzzer(6);
    int taken = 0;
    for (int round = 0; round < iterations(); ++round) {
        auto list = fuzzer.below(2) ? field_list(fields, kernels) : field_list(fields);
        for (auto times = 1 + fuzzer.below(3); times > 0; --times) fuzzer.damage(list);
        taken += is_taken(creator, list, fields);
    }
    std::cout << "        " << iterations() << " lists of fields, " << taken << " taken\n";
    CHECK(taken > 0 && taken < iterations() / 2);
    CHECK_EQUAL(stand_in.live(), 0);
}
