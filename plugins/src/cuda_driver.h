#pragma once

#include <cuda.h>

#include "target.h"

namespace bpkv {

/// The few functions of CUDA's driver that launching takes, found in the process at run time: nothing links to it.
///
/// The driver stays loaded, since it is the process's. Failures raise Refusal with the driver's own words.
class CudaDriver {
public:
    /// Loads libcuda.so.1 unless the process has it.
    static CudaDriver open();

    int current_device() const;
    Capability capability(int device) const;
    CUlibrary load(void const* image) const;
    void unload(CUlibrary library) const noexcept;
    CUkernel kernel(CUlibrary library, char const* name) const;
    void allow_shared_bytes(CUkernel kernel, int device, int bytes) const;

    /// Into the current context, which CUDA may put off to the first launch. Drivers before 12.4 may still do so.
    void load_now(CUkernel kernel) const;

    struct Configuration {
        unsigned grid_x, grid_y, grid_z;
        unsigned threads;
        unsigned shared_bytes;
    };
    void launch(CUkernel kernel, Configuration const& configuration, CUstream stream, void** parameters) const;

private:
    CudaDriver() = default;
    void expect_success(CUresult result, char const* function) const;

    decltype(&cuInit) init_ = nullptr;
    decltype(&cuGetErrorString) error_string_ = nullptr;
    decltype(&cuCtxGetDevice) current_device_ = nullptr;
    decltype(&cuDeviceGetAttribute) attribute_ = nullptr;
    decltype(&cuLibraryLoadData) load_ = nullptr;
    decltype(&cuLibraryUnload) unload_ = nullptr;
    decltype(&cuLibraryGetKernel) kernel_ = nullptr;
    decltype(&cuKernelSetAttribute) set_attribute_ = nullptr;
    decltype(&cuKernelGetFunction) function_ = nullptr;
    CUresult(CUDAAPI* load_function_)(CUfunction) = nullptr;  // cuFuncLoad, null before CUDA 12.4
    decltype(&cuLaunchKernel) launch_ = nullptr;
};

}  // namespace bpkv
