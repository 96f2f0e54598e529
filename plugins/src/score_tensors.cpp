#include "score_tensors.h"

#include "refusal.h"

namespace bpkv {

using nvinfer1::DataType;

void expect_counts(std::int32_t inputs, std::int32_t outputs) {
    if (inputs == input_count && outputs == output_count) return;
    throw Refusal("there are ", inputs, " inputs and ", outputs, " outputs; expected ", int{input_count}, " and ",
                  output_count, ".");
}

DataType tensor_type(std::int32_t place, NumberType activations) {
    switch (place) {
        case input_q:
        case input_context:
        case input_readout:
            if (activations == NumberType::fp32) return DataType::kFLOAT;
            return activations == NumberType::fp16 ? DataType::kHALF : DataType::kBF16;
        case input_offsets:
        case input_block_offsets:
        case input_lengths: return DataType::kINT32;
        case input_pool_addresses: return DataType::kINT64;
        default: return DataType::kFLOAT;
    }
}

}  // namespace bpkv
