#pragma once

#include <vector>

#include "cuda_driver.h"
#include "kernel_bundle.h"
#include "score_arguments.h"
#include "score_launches.h"

namespace bpkv {

/// The kernels of a bundle on one device. They refer to the bundle, which must outlive them.
class LoadedKernels {
public:
    /// Loads all of the device's target, so that no later call has to: CUDA itself would put it off to the first launch
    /// of each kernel. Raises Refusal where that fails.
    LoadedKernels(CudaDriver const& driver, int device, KernelBundle const& bundle);

    TargetKernels const& target() const { return target_; }

    /// Enqueue one kernel; allocates nothing.
    void launch(Launch const& launch, ScoreArguments& arguments, CUstream stream) const;

private:
    /// Unloads what was loaded.
    class Library {
    public:
        Library(CudaDriver const& driver, void const* image) : driver_(&driver), handle_(driver.load(image)) {}
        Library(Library&& other) noexcept : driver_(other.driver_), handle_(other.handle_) { other.handle_ = nullptr; }
        Library& operator=(Library&&) = delete;
        ~Library() {
            if (handle_ != nullptr) driver_->unload(handle_);
        }
        CUlibrary handle() const { return handle_; }

    private:
        CudaDriver const* driver_;
        CUlibrary handle_;
    };

    CudaDriver const& driver_;
    TargetKernels const& target_;
    std::vector<Library> libraries_;
    std::vector<CUkernel> kernels_;  // as in target_.kernels
};

}  // namespace bpkv
