#include "cuda_driver.h"

#include <dlfcn.h>

#include "refusal.h"

namespace bpkv {

namespace {

constexpr char const* file = "libcuda.so.1";

template <typename Function>
void find_optional(void* library, char const* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
}

template <typename Function>
void find(void* library, char const* name, Function& function) {
    find_optional(library, name, function);
    if (function != nullptr) return;
    throw Refusal("CUDA's driver has no ", name, "; install a driver for CUDA 12 or later.");
}

}  // namespace

CudaDriver CudaDriver::open() {
    void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        auto const* const reason = dlerror();
        throw Refusal("CUDA's driver cannot be loaded (", reason ? reason : file,
                      "); run on a machine with an NVIDIA GPU, in a container started with access to it.");
    }
    CudaDriver driver;
    find(library, "cuInit", driver.init_);
    find(library, "cuGetErrorString", driver.error_string_);
    find(library, "cuCtxGetDevice", driver.current_device_);
    find(library, "cuDeviceGetAttribute", driver.attribute_);
    find(library, "cuLibraryLoadData", driver.load_);
    find(library, "cuLibraryUnload", driver.unload_);
    find(library, "cuLibraryGetKernel", driver.kernel_);
    find(library, "cuKernelSetAttribute", driver.set_attribute_);
    find(library, "cuKernelGetFunction", driver.function_);
    find_optional(library, "cuFuncLoad", driver.load_function_);
    find(library, "cuLaunchKernel", driver.launch_);
    driver.expect_success(driver.init_(0), "cuInit");
    return driver;
}

int CudaDriver::current_device() const {
    CUdevice device = 0;
    expect_success(current_device_(&device), "cuCtxGetDevice");
    return device;
}

Capability CudaDriver::capability(int device) const {
    Capability result{};
    auto const get = [&](int& value, CUdevice_attribute attribute) {
        expect_success(attribute_(&value, attribute, device), "cuDeviceGetAttribute");
    };
    get(result.major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    get(result.minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    return result;
}

CUlibrary CudaDriver::load(void const* image) const {
    CUlibrary library = nullptr;
    expect_success(load_(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
    return library;
}

void CudaDriver::unload(CUlibrary library) const noexcept {
    unload_(library);  // fails where the process ends and the driver is gone already: nothing is lost
}

CUkernel CudaDriver::kernel(CUlibrary library, char const* name) const {
    CUkernel kernel = nullptr;
    expect_success(kernel_(&kernel, library, name), "cuLibraryGetKernel");
    return kernel;
}

void CudaDriver::allow_shared_bytes(CUkernel kernel, int device, int bytes) const {
    expect_success(set_attribute_(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes, kernel, device),
                   "cuKernelSetAttribute");
}

void CudaDriver::load_now(CUkernel kernel) const {
    CUfunction function = nullptr;
    expect_success(function_(&function, kernel), "cuKernelGetFunction");
    if (load_function_ != nullptr) expect_success(load_function_(function), "cuFuncLoad");
}

void CudaDriver::launch(CUkernel kernel, Configuration const& c, CUstream stream, void** parameters) const {
    auto const function = reinterpret_cast<CUfunction>(kernel);  // cuLaunchKernel takes either
    expect_success(
        launch_(function, c.grid_x, c.grid_y, c.grid_z, c.threads, 1, 1, c.shared_bytes, stream, parameters, nullptr),
        "cuLaunchKernel");
}

void CudaDriver::expect_success(CUresult result, char const* function) const {
    if (result == CUDA_SUCCESS) return;
    char const* words = nullptr;
    if (error_string_(result, &words) != CUDA_SUCCESS || words == nullptr) words = "unknown";
    throw Refusal(function, " failed with error ", static_cast<int>(result), ": ", words,
                  ". Run once with CUDA_LAUNCH_BLOCKING=1 if it may come from earlier work.");
}

}  // namespace bpkv
