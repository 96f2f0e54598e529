#pragma once

#include <array>
#include <cstdint>

#include "kernel_bundle.h"
#include "score_fields.h"
#include "score_launches.h"
#include "score_shape.h"
#include "score_workspace.h"

namespace bpkv {

/// The values of all arguments of one call. Kernels are given pointers to them, so it may not move.
class ScoreArguments {
public:
    /// Raises Refusal for a null pointer, or one that is not aligned as kernels were promised.
    ScoreArguments(ScoreFields const& fields, ScoreShape const& shape, ScoreLaunches const& launches,
                   ScoreWorkspace const& places, void const* const* inputs, void* scores, void* workspace);
    ScoreArguments(ScoreArguments const&) = delete;
    ScoreArguments& operator=(ScoreArguments const&) = delete;

    using Parameters = std::array<void*, argument_count + most_hidden_arguments>;

    /// As cuLaunchKernel takes them: the kernel's arguments in its own order, then null for the hidden ones.
    Parameters parameters_of(Kernel const& kernel);

private:
    union Value {
        void const* pointer;
        std::int32_t integer;
        float number;
    };

    Value& at(Argument argument) { return values_[static_cast<std::size_t>(argument)]; }
    void set(Argument argument, void const* value) { at(argument).pointer = value; }
    void set(Argument argument, std::int64_t value) { at(argument).integer = static_cast<std::int32_t>(value); }
    void set(Argument argument, float value) { at(argument).number = value; }

    std::array<Value, argument_count> values_{};
    void* hidden_ = nullptr;
};

}  // namespace bpkv
