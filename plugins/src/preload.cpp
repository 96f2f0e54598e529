// Where this library is preloaded, nobody calls it: it registers itself, as `LD_PRELOAD=... tritonserver` expects.

#include <cstdlib>
#include <dlfcn.h>
#include <string_view>

#include "library.h"
#include "refusal.h"

namespace bpkv {

namespace {

std::string_view file_name(std::string_view path) { return path.substr(path.find_last_of('/') + 1); }

bool is_preloaded() {
    Dl_info own{};
    auto const* const list = std::getenv("LD_PRELOAD");
    if (list == nullptr || dladdr(reinterpret_cast<void const*>(&creator), &own) == 0) return false;
    std::string_view rest(list);
    while (!rest.empty()) {
        auto const end = rest.find_first_of(": ");
        if (file_name(rest.substr(0, end)) == file_name(own.dli_fname)) return true;
        rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    }
    return false;
}

__attribute__((constructor)) void register_if_preloaded() {
    auto* const own = is_preloaded() ? creator() : nullptr;
    if (own == nullptr) return;
    guarded(own->log(), "preloaded", false, [&] {
        auto const process = TensorRtProcess::find_or_load();
        if (!process) {
            throw Refusal("no TensorRT library is found; add the folder of libnvinfer.so.", NV_TENSORRT_MAJOR,
                          " to LD_LIBRARY_PATH, or preload the plugin for the server alone.");
        }
        register_creator(*own, *process);
        return true;
    });
}

}  // namespace

}  // namespace bpkv
