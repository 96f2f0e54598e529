#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include "cuda_driver.h"
#include "kernel_bundle.h"
#include "loaded_kernels.h"

namespace bpkv {

/// The kernels of one checksum, on all devices that used them, shared by all layers that name them. Thread-safe.
class KernelSet {
public:
    explicit KernelSet(std::int64_t checksum) : checksum_(checksum) {}
    KernelSet(KernelSet const&) = delete;
    KernelSet& operator=(KernelSet const&) = delete;

    /// Take a copy of the kernels, unless they are here; raises Refusal for a bundle that is damaged or another.
    void carry(std::string_view bytes);

    /// Once carried it stays. Raises Refusal where nobody carried it.
    KernelBundle const& bundle() const;

    /// Loaded at the first call on a device, and never again. Raises Refusal where that fails; a later call retries.
    LoadedKernels const& on_current_device();

private:
    std::int64_t const checksum_;
    std::mutex mutable mutex_;
    std::unique_ptr<KernelBundle const> bundle_;
    std::optional<CudaDriver> driver_;
    std::map<int, LoadedKernels> devices_;
};

}  // namespace bpkv
