// A stand-in for CUDA's driver: it keeps count, refuses what the real one would, and hands launches to a callback.

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define STAND_IN_API extern "C" __attribute__((visibility("default")))

namespace {

using OnLaunch = int (*)(void const* image, char const* kernel, int device, unsigned grid[3], unsigned threads,
                         unsigned shared_bytes, void* stream, void** arguments);
using Handle = std::uintptr_t;

constexpr unsigned shared_bytes_without_asking = 48 * 1024;
constexpr unsigned most_of_grid = 65535;  // of its second and third dimension
constexpr unsigned most_threads = 1024;
constexpr std::pair<int, int> default_capability{9, 0};

struct Kernel {
    Handle library;
    std::string name;
    std::map<int, int> shared_bytes;  // allowed, by device
};

struct State {
    std::mutex mutex;
    std::map<int, std::pair<int, int>> capabilities;
    std::map<std::string, int> counts;
    std::map<std::string, int> failures;
    std::map<Handle, void const*> libraries;
    std::map<Handle, Kernel> kernels;
    Handle last_handle = 0;
    OnLaunch on_launch = nullptr;
};

State& state() {
    static State* const only = new State;  // never destroyed: libraries are unloaded while the process ends
    return *only;
}

thread_local int current_device = 0;          // of the calling thread's context; -1: it is in none
thread_local std::vector<int> devices_below;  // of contexts that others were pushed upon

/// A context is named by its device.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<Handle>(device) + 1); }

/// Runs a driver function under the lock, unless it was told to fail.
template <typename Action>
CUresult locked(char const* function, Action const& action) {
    std::lock_guard const lock(state().mutex);
    auto const told = state().failures.find(function);
    return told == state().failures.end() ? action(state()) : static_cast<CUresult>(told->second);
}

CUresult expect_launchable(State const& now, Handle handle, int device, unsigned const grid[3], unsigned threads,
                           unsigned shared_bytes) {
    auto const kernel = now.kernels.find(handle);
    if (kernel == now.kernels.end()) return CUDA_ERROR_INVALID_VALUE;
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return CUDA_ERROR_INVALID_VALUE;
    if (grid[1] > most_of_grid || grid[2] > most_of_grid) return CUDA_ERROR_INVALID_VALUE;
    if (threads == 0 || threads > most_threads) return CUDA_ERROR_INVALID_VALUE;
    if (shared_bytes > shared_bytes_without_asking) {
        auto const allowed = kernel->second.shared_bytes.find(device);
        if (allowed == kernel->second.shared_bytes.end()) return CUDA_ERROR_INVALID_VALUE;
        if (static_cast<unsigned>(allowed->second) < shared_bytes) return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

}  // namespace

STAND_IN_API CUresult cuInit(unsigned) {
    return locked("cuInit", [](State&) { return CUDA_SUCCESS; });
}

STAND_IN_API CUresult cuGetErrorString(CUresult error, char const** text) {
    *text = error == CUDA_SUCCESS ? "no error" : "an error of the stand-in";
    return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuGetErrorName(CUresult error, char const** text) {
    *text = error == CUDA_SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_OF_STAND_IN";
    return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuCtxGetDevice(CUdevice* device) {
    return locked("cuCtxGetDevice", [&](State&) {
        *device = current_device;
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return locked("cuDevicePrimaryCtxRetain", [&](State&) {
        *context = context_of(device);
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuCtxGetCurrent(CUcontext* context) {
    return locked("cuCtxGetCurrent", [&](State&) {
        *context = context_of(current_device);
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuCtxPushCurrent(CUcontext context) {
    return locked("cuCtxPushCurrent", [&](State&) {
        if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
        devices_below.push_back(current_device);
        current_device = static_cast<int>(reinterpret_cast<Handle>(context)) - 1;
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuCtxPopCurrent(CUcontext* context) {
    return locked("cuCtxPopCurrent", [&](State&) {
        if (devices_below.empty()) return CUDA_ERROR_INVALID_CONTEXT;
        *context = context_of(current_device);
        current_device = devices_below.back();
        devices_below.pop_back();
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    return locked("cuDeviceGetAttribute", [&](State& now) {
        auto const set = now.capabilities.find(device);
        auto const [major, minor] = set == now.capabilities.end() ? default_capability : set->second;
        if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) {
            *value = major;
        } else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) {
            *value = minor;
        } else {
            return CUDA_ERROR_INVALID_VALUE;
        }
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuLibraryLoadData(CUlibrary* library, void const* image, CUjit_option*, void**, unsigned,
                                        CUlibraryOption*, void**, unsigned) {
    return locked("cuLibraryLoadData", [&](State& now) {
        if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
        now.libraries[++now.last_handle] = image;
        ++now.counts["loads"];
        *library = reinterpret_cast<CUlibrary>(now.last_handle);
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuLibraryUnload(CUlibrary library) {
    return locked("cuLibraryUnload", [&](State& now) {
        auto const handle = reinterpret_cast<Handle>(library);
        if (now.libraries.erase(handle) == 0) return CUDA_ERROR_INVALID_HANDLE;
        for (auto each = now.kernels.begin(); each != now.kernels.end();) {
            each = each->second.library == handle ? now.kernels.erase(each) : ++each;
        }
        ++now.counts["unloads"];
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, char const* name) {
    return locked("cuLibraryGetKernel", [&](State& now) {
        auto const handle = reinterpret_cast<Handle>(library);
        if (now.libraries.count(handle) == 0) return CUDA_ERROR_INVALID_HANDLE;
        now.kernels[++now.last_handle] = {handle, name, {}};
        *kernel = reinterpret_cast<CUkernel>(now.last_handle);
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                           CUdevice device) {
    return locked("cuKernelSetAttribute", [&](State& now) {
        auto const found = now.kernels.find(reinterpret_cast<Handle>(kernel));
        if (found == now.kernels.end()) return CUDA_ERROR_INVALID_HANDLE;
        if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
        found->second.shared_bytes[device] = value;
        ++now.counts["attributes"];
        return CUDA_SUCCESS;
    });
}

STAND_IN_API CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    return locked("cuKernelGetFunction", [&](State& now) {
        if (now.kernels.count(reinterpret_cast<Handle>(kernel)) == 0) return CUDA_ERROR_INVALID_HANDLE;
        *function = reinterpret_cast<CUfunction>(kernel);
        return CUDA_SUCCESS;
    });
}

#ifndef STAND_IN_BEFORE_CUDA_12_4
STAND_IN_API CUresult cuFuncLoad(CUfunction function) {
    return locked("cuFuncLoad", [&](State& now) {
        if (now.kernels.count(reinterpret_cast<Handle>(function)) == 0) return CUDA_ERROR_INVALID_HANDLE;
        ++now.counts["functions"];
        return CUDA_SUCCESS;
    });
}
#endif

STAND_IN_API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                     unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,
                                     CUstream stream, void** arguments, void** extra) {
    unsigned grid[3] = {grid_x, grid_y, grid_z};
    OnLaunch on_launch = nullptr;
    void const* image = nullptr;
    char const* name = nullptr;  // both live as long as their library, which nobody unloads while it is launched
    auto const result = locked("cuLaunchKernel", [&](State& now) {
        auto const handle = reinterpret_cast<Handle>(function);
        if (threads_y != 1 || threads_z != 1 || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
        auto const launchable = expect_launchable(now, handle, current_device, grid, threads, shared_bytes);
        if (launchable != CUDA_SUCCESS) return launchable;
        auto const& kernel = now.kernels.at(handle);
        image = now.libraries.at(kernel.library);
        name = kernel.name.c_str();
        on_launch = now.on_launch;
        ++now.counts["launches"];
        return CUDA_SUCCESS;
    });
    if (result != CUDA_SUCCESS || on_launch == nullptr) return result;
    // Without the lock: a callback may take its time, and another lock.
    return static_cast<CUresult>(
        on_launch(image, name, current_device, grid, threads, shared_bytes, stream, arguments));
}

/// The device of the calling thread's context; -1: it is in none.
STAND_IN_API void stand_in_set_device(int ordinal) { current_device = ordinal; }

STAND_IN_API void stand_in_set_capability(int ordinal, int major, int minor) {
    std::lock_guard const lock(state().mutex);
    state().capabilities[ordinal] = {major, minor};
}

/// What every launch is handed to, and whose result it returns; null: launches are counted only.
STAND_IN_API void stand_in_set_launch(OnLaunch on_launch) {
    std::lock_guard const lock(state().mutex);
    state().on_launch = on_launch;
}

/// Let a function of the driver fail with a result; 0: no longer.
STAND_IN_API void stand_in_fail(char const* function, int result) {
    std::lock_guard const lock(state().mutex);
    if (result == 0) {
        state().failures.erase(function);
    } else {
        state().failures[function] = result;
    }
}

/// "loads", "unloads", "live" (loaded and not unloaded), "functions" (loaded), "launches" or "attributes"; -1 for
/// another.
STAND_IN_API int stand_in_count(char const* what) {
    std::lock_guard const lock(state().mutex);
    if (std::strcmp(what, "live") == 0) return static_cast<int>(state().libraries.size());
    for (auto const* const known : {"loads", "unloads", "functions", "launches", "attributes"}) {
        if (std::strcmp(what, known) == 0) return state().counts[what];
    }
    return -1;
}

/// As at the beginning, for all threads' devices but the caller's own; what is loaded stays loaded.
STAND_IN_API void stand_in_reset() {
    std::lock_guard const lock(state().mutex);
    state().capabilities.clear();
    state().counts.clear();
    state().failures.clear();
    state().on_launch = nullptr;
    current_device = 0;
}
