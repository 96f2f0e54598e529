#pragma once

#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <mutex>

namespace bpkv {

/// The domain "bpkv" of a profiler, as bpkv_trt/profiling.py names it; made at its first range.
///
/// It is never destroyed: tools may keep what they were given until the process ends.
class NvtxDomain {
public:
    nvtxDomainHandle_t handle() const {
        std::call_once(made_, [&] { handle_ = nvtxDomainCreateA("bpkv"); });
        return handle_;
    }

private:
    std::once_flag mutable made_;
    nvtxDomainHandle_t mutable handle_ = nullptr;
};

/// A range of the calling thread, as long as it lives.
class NvtxRange {
public:
    /// `payload`: scoring rows that the range handles.
    NvtxRange(NvtxDomain const& domain, char const* name, std::int64_t payload) : domain_(domain.handle()) {
        nvtxEventAttributes_t attributes{};
        attributes.version = NVTX_VERSION;
        attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
        attributes.message.ascii = name;
        attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
        attributes.payload.llValue = payload;
        nvtxDomainRangePushEx(domain_, &attributes);
    }
    NvtxRange(NvtxRange const&) = delete;
    NvtxRange& operator=(NvtxRange const&) = delete;
    ~NvtxRange() { nvtxDomainRangePop(domain_); }

private:
    nvtxDomainHandle_t domain_;
};

}  // namespace bpkv
