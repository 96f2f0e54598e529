#pragma once

#include "score_creator.h"
#include "tensorrt_process.h"

namespace bpkv {

/// The creator of this library, made at the first call; null, with a line on stderr, where there is no memory for it.
ScoreCreator* creator() noexcept;

/// Adds the creator to the registry of the TensorRT in this process, once; raises Refusal where that is not possible.
void register_creator(ScoreCreator& creator, TensorRtProcess const& process);

}  // namespace bpkv
