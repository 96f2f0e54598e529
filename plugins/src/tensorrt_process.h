#pragma once

#include <NvInferRuntime.h>

#include <optional>

namespace bpkv {

/// The TensorRT that this process uses. Nothing links to it: three of its libraries have a registry of plugins.
class TensorRtProcess {
public:
    /// What the process has loaded, if it can be found.
    static std::optional<TensorRtProcess> find();

    /// As `find`, else it is loaded, for all to see: what loads it later then meets the same registry.
    static std::optional<TensorRtProcess> find_or_load();

    /// Raises Refusal where the library is of another major version than the headers that this was built with.
    void expect_major() const;

    /// Raises Refusal where there is none.
    nvinfer1::IPluginRegistry& registry() const;

private:
    explicit TensorRtProcess(void* library) : library_(library) {}

    void* library_;  // as dlsym takes it
};

}  // namespace bpkv
