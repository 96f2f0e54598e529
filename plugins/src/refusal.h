#pragma once

#include <stdexcept>

#include "text.h"

namespace bpkv {

/// What is wrong, why, and what to do next, in one line that is logged before an error is returned to TensorRT.
class Refusal : public std::runtime_error {
public:
    template <typename... Parts>
    explicit Refusal(Parts const&... parts) : std::runtime_error(text(parts...)) {}
};

}  // namespace bpkv
