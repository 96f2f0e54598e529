#include "kernel_bundle.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <system_error>

#include "bundle_reader.h"
#include "refusal.h"

namespace bpkv {

namespace {

constexpr std::string_view magic = "BPKVKRNL";
constexpr std::uint32_t version = 1;
constexpr std::size_t image_alignment = 16;
constexpr std::uint32_t most_threads = 1024;
constexpr std::uint32_t most_shared_bytes = std::numeric_limits<std::int32_t>::max();

constexpr char const* other_kernels = " was built for other kernels; build plugin and engine from one release.";

/// Text by name, as a record lists it.
class Pairs {
public:
    Pairs(BundleReader& reader, std::string_view owner) : owner_(owner) {
        for (auto count = reader.u32(); count > 0; --count) {
            auto const name = reader.name();
            bool const is_new = values_.emplace(name, reader.name()).second;
            if (!is_new) throw Refusal(owner_, " has ", name, " twice; ", BundleReader::advice);
        }
    }

    std::string_view text(char const* name) const {
        auto const found = values_.find(name);
        if (found == values_.end()) throw Refusal(owner_, " has no constant ", name, " and", other_kernels);
        return found->second;
    }

    /// At least 1.
    std::int32_t count(char const* name) const {
        auto const digits = text(name);
        auto const* const end = digits.data() + digits.size();
        std::int32_t number = 0;
        auto const read = std::from_chars(digits.data(), end, number);
        if (read.ec == std::errc() && read.ptr == end && number >= 1) return number;
        throw Refusal(owner_, " has ", name, " '", digits, "'; expected 1 or more: ", BundleReader::advice);
    }

private:
    std::string_view owner_;
    std::map<std::string_view, std::string_view> values_;
};

/// What all kernels of a bundle say about the model, put together.
class AgreedGeometry {
public:
    template <typename Value>
    void agree(Value Geometry::* member, Value value, char const* name) {
        auto const before = std::find(set_.begin(), set_.end(), name);
        if (before == set_.end()) {
            set_.push_back(name);
            geometry_.*member = value;
        } else if (geometry_.*member != value) {
            refuse(name);
        }
    }

    /// A constant that no layer has a field for.
    void agree(std::string_view value, char const* name) {
        if (constants_.emplace(name, value).first->second != value) refuse(name);
    }

    Geometry const& get() const { return geometry_; }

private:
    [[noreturn]] static void refuse(char const* name) {
        throw Refusal("the kernels differ in ", name, " among each other; compile them for one model.");
    }

    Geometry geometry_;
    std::vector<std::string_view> set_;
    std::map<std::string_view, std::string_view> constants_;
};

std::vector<Argument> read_arguments(BundleReader& reader, ScoreKernel kernel, AgreedGeometry& geometry) {
    std::vector<Argument> arguments;
    auto const unknown = [&](auto const&... what) {
        return Refusal("kernel ", name_of(kernel), what..., other_kernels);
    };
    for (auto count = reader.u32(); count > 0; --count) {
        auto const name = reader.name(), type = reader.name();
        auto const argument = argument_of(kernel, name);
        if (!argument) throw unknown(" has an argument ", name, " that this library does not know and");
        if (std::find(arguments.begin(), arguments.end(), *argument) != arguments.end()) {
            throw unknown(" has an argument ", name, " twice and");
        }
        if (is_activation(*argument)) {
            auto const pointer = !type.empty() && type.front() == '*';
            auto const activations = number_type(pointer ? type.substr(1) : "", activation_types);
            if (!activations) throw unknown(" has an argument ", name, " of type ", type, " and");
            geometry.agree(&Geometry::activations, *activations, "activations");
        } else if (type != type_of(*argument)) {
            throw unknown(" has an argument ", name, " of type ", type, ", here ", type_of(*argument), ", and");
        }
        arguments.push_back(*argument);
    }
    if (arguments.size() != arguments_of(kernel)) throw unknown(" lacks arguments and");
    return arguments;
}

void read_constants(BundleReader& reader, Kernel& kernel, AgreedGeometry& geometry) {
    Pairs const constants(reader, name_of(kernel.name));
    auto const agree = [&](std::int32_t Geometry::* member, char const* constant, char const* name) {
        geometry.agree(member, constants.count(constant), name);
    };
    if (kernel.name == ScoreKernel::combined_log_sum_exp) {
        kernel.splits = constants.count("SPLITS");
        kernel.columns = constants.count("COLUMNS");
        return;
    }
    agree(&Geometry::head_dim, "D", "head_dim");
    if (kernel.name != ScoreKernel::partial_log_sum_exp) {
        kernel.tile = constants.count("TILE");
        agree(&Geometry::top_k, "CHANNELS", "top_k");
    }
    if (kernel.name == ScoreKernel::read_context) return agree(&Geometry::query_heads, "HEADS", "query_heads");

    kernel.block = constants.count("BLOCK");
    agree(&Geometry::kv_heads, "KV_HEADS", "kv_heads");
    agree(&Geometry::kv_heads, "PAGE_HEADS", "kv_heads");
    agree(&Geometry::tokens_per_block, "PAGE_SIZE", "tokens_per_block");
    auto const heads = std::int64_t{constants.count("GROUP")} * constants.count("KV_HEADS");
    if (heads > std::numeric_limits<std::int32_t>::max()) {
        throw Refusal("the kernels have ", heads, " query heads; ", BundleReader::advice);
    }
    geometry.agree(&Geometry::query_heads, static_cast<std::int32_t>(heads), "query_heads");
    auto const cache = number_type(constants.text("CACHE"), static_cast<int>(number_type_names.size()));
    if (!cache) throw Refusal("the kernels read a cache of ", constants.text("CACHE"), " and", other_kernels);
    geometry.agree(&Geometry::cache, *cache, "cache");
    geometry.agree(constants.text("SOFTCAP"), "SOFTCAP");
    if (kernel.name == ScoreKernel::score_entries) geometry.agree(constants.text("PROBES"), "PROBES");
}

Kernel read_kernel(BundleReader& reader, AgreedGeometry& geometry) {
    Kernel kernel{};
    auto const name = reader.name();
    auto const known = score_kernel(name);
    if (!known) throw Refusal("a kernel named ", name, ", which this library does not know,", other_kernels);
    kernel.name = *known;
    kernel.threads = reader.u32();
    kernel.shared_bytes = reader.u32();
    kernel.hidden_arguments = reader.u32();
    if (kernel.threads < 1 || kernel.threads > most_threads || kernel.shared_bytes > most_shared_bytes ||
        kernel.hidden_arguments > most_hidden_arguments) {
        throw Refusal("kernel ", name, " has ", kernel.threads, " threads, ", kernel.shared_bytes,
                      " bytes of shared memory and ", kernel.hidden_arguments,
                      " hidden arguments, which cannot be launched; ", BundleReader::advice);
    }
    kernel.arguments = read_arguments(reader, kernel.name, geometry);
    read_constants(reader, kernel, geometry);
    auto const size = reader.u64();
    reader.align(image_alignment);
    kernel.image = reader.bytes(size);
    if (kernel.image.empty()) throw Refusal("kernel ", name, " has no image; ", BundleReader::advice);
    return kernel;
}

bool same_variant(Kernel const& a, Kernel const& b) { return a.name == b.name && a.block == b.block; }

void add(std::vector<TargetKernels>& targets, Target target, Kernel kernel) {
    auto of_target =
        std::find_if(targets.begin(), targets.end(), [&](auto const& each) { return each.target == target; });
    if (of_target == targets.end()) of_target = targets.insert(targets.end(), TargetKernels{target, {}, {}});
    for (auto const& other : of_target->kernels) {
        if (!same_variant(other, kernel)) continue;
        throw Refusal("kernel ", name_of(kernel.name), kernel.block ? text(" with BLOCK ", kernel.block) : "",
                      " comes twice for target ", name_of(target), "; ", BundleReader::advice);
    }
    of_target->kernels.push_back(std::move(kernel));
}

/// Fills in `blocks`.
void expect_complete(TargetKernels& target) {
    for (auto const& kernel : target.kernels) {
        if (kernel.name == ScoreKernel::partial_log_sum_exp) target.blocks.push_back(kernel.block);
    }
    std::sort(target.blocks.begin(), target.blocks.end());
    auto wanted = target.blocks;
    if (wanted.empty()) wanted.push_back(0);  // then that kernel is what is missing
    for (std::size_t each = 0; each < score_kernel_names.size(); ++each) {
        auto const name = static_cast<ScoreKernel>(each);
        for (auto const block : has_blocks(name) ? wanted : std::vector{0}) {
            if (target.place(name, block) < target.kernels.size()) continue;
            throw Refusal("the kernels for target ", name_of(target.target), " lack ", name_of(name),
                          block ? text(" with BLOCK ", block) : "", "; ", BundleReader::advice);
        }
    }
    if (target.kernels.size() != 2 * target.blocks.size() + 2) {
        throw Refusal("the kernels for target ", name_of(target.target),
                      " have score_entries with a BLOCK that partial_log_sum_exp lacks; ", BundleReader::advice);
    }
}

}  // namespace

std::size_t TargetKernels::place(ScoreKernel name, std::int32_t block) const {
    std::size_t place = 0;
    while (place < kernels.size() && (kernels[place].name != name || kernels[place].block != block)) ++place;
    return place;
}

KernelBundle::KernelBundle(std::string_view bytes) : bytes_(bytes) {
    BundleReader reader(bytes_);
    if (bytes_.size() < magic.size() || reader.bytes(magic.size()) != magic) {
        throw Refusal("the kernels do not begin as a bundle does; ", BundleReader::advice);
    }
    if (auto const given = reader.u32(); given != version) {
        throw Refusal("the kernels are a bundle of version ", given, ", here ", version,
                      "; build plugin and engine from one release.");
    }
    rows_per_split_ = Pairs(reader, "the bundle").count("rows_per_split");
    AgreedGeometry geometry;
    for (auto count = reader.u32(); count > 0; --count) {
        auto const name = reader.name();
        auto const target = parse_target(name);
        if (!target) throw Refusal("the kernels have a target '", name, "'; expected one such as 80 or 90a.");
        add(targets_, *target, read_kernel(reader, geometry));
    }
    reader.expect_end();
    if (targets_.empty()) throw Refusal("the kernels are an empty bundle; compile them for a target.");
    for (auto& target : targets_) expect_complete(target);
    geometry_ = geometry.get();
}

std::int32_t KernelBundle::most_splits() const {
    std::int32_t most = 0;
    for (auto const& target : targets_) {
        most = std::max(most, target.get(ScoreKernel::combined_log_sum_exp, 0).splits);
    }
    return most;
}

TargetKernels const& KernelBundle::for_device(Capability device) const {
    std::vector<Target> targets;
    for (auto const& each : targets_) targets.push_back(each.target);
    if (auto const chosen = choose_target(targets, device)) return targets_[*chosen];
    std::string present;
    for (auto const target : targets) present += (present.empty() ? "" : ", ") + name_of(target);
    throw Refusal("the device has compute capability ", device.major, ".", device.minor,
                  " and the kernels are compiled for ", present, "; compile them for this device too.");
}

}  // namespace bpkv
