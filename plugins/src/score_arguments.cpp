#include "score_arguments.h"

#include "refusal.h"
#include "score_tensors.h"

namespace bpkv {

namespace {

constexpr std::uintptr_t alignment = 16;  // of every tensor, as bpkv_trt/kernels/aot.py compiles

void expect_memory(char const* name, void const* pointer) {
    if (pointer == nullptr) throw Refusal(name, " has no memory; give the address of a device tensor.");
    if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
        throw Refusal(name, " does not begin at a multiple of ", alignment, " bytes; give memory that does.");
    }
}

}  // namespace

ScoreArguments::ScoreArguments(ScoreFields const& fields, ScoreShape const& shape, ScoreLaunches const& launches,
                               ScoreWorkspace const& places, void const* const* inputs, void* scores, void* workspace) {
    for (std::int32_t each = 0; each < input_count; ++each) expect_memory(input_names[each], inputs[each]);
    expect_memory("scores", scores);
    expect_memory("the workspace", workspace);

    auto const addresses =
        static_cast<std::int64_t const*>(inputs[input_pool_addresses]) + 2 * std::int64_t{fields.pool};
    auto const tables = static_cast<std::int32_t const*>(inputs[input_block_offsets]);
    auto const key_pages = tables + 2 * shape.blocks * shape.sequences * fields.pool;
    auto const scratch = static_cast<char*>(workspace);

    set(Argument::q, inputs[input_q]);
    set(Argument::context, inputs[input_context]);
    set(Argument::readout, inputs[input_readout]);
    set(Argument::p, inputs[input_p]);
    set(Argument::weights, inputs[input_weights]);
    set(Argument::offsets, inputs[input_offsets]);
    set(Argument::addresses, addresses);
    set(Argument::key_pages, key_pages);
    set(Argument::value_pages, key_pages + shape.blocks);
    set(Argument::lengths, inputs[input_lengths]);
    set(Argument::partials, scratch + places.partials);
    set(Argument::lse, scratch + places.lse);
    set(Argument::context_read, scratch + places.context_read);
    set(Argument::scores, scores);

    set(Argument::rows, shape.rows);
    set(Argument::columns, shape.rows * fields.query_heads);
    set(Argument::blocks, std::int64_t{launches.blocks});
    set(Argument::splits, std::int64_t{launches.splits});
    set(Argument::sequence_stride, 2 * shape.blocks);
    set(Argument::head_stride, std::int64_t{0});  // all KV heads share a list of blocks, and a length
    set(Argument::length_sequence_stride, std::int64_t{1});
    set(Argument::length_head_stride, std::int64_t{0});
    set(Argument::first_page, 2 * std::int64_t{fields.layer_in_pool});
    set(Argument::window, shape.capacity);  // none: every row is within it
    set(Argument::longest, shape.longest());
    set(Argument::scale, fields.scale * fields.key_scale);
    set(Argument::value_scale, fields.value_scale);
}

ScoreArguments::Parameters ScoreArguments::parameters_of(Kernel const& kernel) {
    Parameters parameters{};
    std::size_t place = 0;
    for (auto const argument : kernel.arguments) parameters[place++] = &at(argument);
    for (std::uint32_t each = 0; each < kernel.hidden_arguments; ++each) parameters[place++] = &hidden_;
    return parameters;
}

}  // namespace bpkv
