#include "tensorrt_process.h"

#include <array>
#include <cstdint>
#include <dlfcn.h>
#include <string>

#include "refusal.h"

namespace bpkv {

namespace {

constexpr char const* get_registry = "getPluginRegistry";
constexpr char const* get_major = "getInferLibMajorVersion";

/// The full library, else the one that only runs engines, else the one that chooses among these.
void* open_first(int mode) {
    for (auto const* const name : {"libnvinfer.so.", "libnvinfer_lean.so.", "libnvinfer_dispatch.so."}) {
        auto const file = text(name, NV_TENSORRT_MAJOR);
        if (void* const library = dlopen(file.c_str(), RTLD_LAZY | RTLD_GLOBAL | mode)) return library;
    }
    return nullptr;
}

}  // namespace

std::optional<TensorRtProcess> TensorRtProcess::find() {
    if (dlsym(RTLD_DEFAULT, get_registry) != nullptr) return TensorRtProcess(RTLD_DEFAULT);
    if (void* const library = open_first(RTLD_NOLOAD)) return TensorRtProcess(library);
    return std::nullopt;
}

std::optional<TensorRtProcess> TensorRtProcess::find_or_load() {
    if (auto const found = find()) return found;
    if (void* const library = open_first(0)) return TensorRtProcess(library);
    return std::nullopt;
}

void TensorRtProcess::expect_major() const {
    auto const major = reinterpret_cast<std::int32_t (*)()>(dlsym(library_, get_major));
    if (major == nullptr || major() == NV_TENSORRT_MAJOR) return;
    throw Refusal("built for TensorRT ", NV_TENSORRT_MAJOR, " and loaded into TensorRT ", major(),
                  "; build the plugin with the headers of TensorRT ", major(), ".");
}

nvinfer1::IPluginRegistry& TensorRtProcess::registry() const {
    auto const get = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(library_, get_registry));
    auto* const registry = get == nullptr ? nullptr : get();
    if (registry == nullptr) throw Refusal("TensorRT has no plugin registry; load libnvinfer before the plugin.");
    return *registry;
}

}  // namespace bpkv
