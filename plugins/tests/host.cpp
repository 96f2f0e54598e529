// Plays TensorRT towards the plugin, for tests in Python (ctypes): the same calls in the same order, without an engine.

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <dlfcn.h>
#include <vector>

#include "shape_expressions.h"

#define HOST_API extern "C" __attribute__((visibility("default")))

using namespace nvinfer1;

extern "C" {

struct HostTensor {
    std::int32_t type;  // nvinfer1::DataType
    std::int32_t rank;
    std::int64_t dims[8];  // -1: unknown when the network is built
    std::int64_t max[8];
};

struct HostField {  // as nvinfer1::PluginField
    char const* name;
    void const* data;
    std::int32_t type;
    std::int32_t length;
};

}  // extern "C"

namespace {

IPluginRegistry* registry() {
    auto const get = reinterpret_cast<IPluginRegistry* (*)()>(dlsym(RTLD_DEFAULT, "getPluginRegistry"));
    return get == nullptr ? nullptr : get();
}

IPluginCreatorV3One* as_creator(void* creator) {
    return static_cast<IPluginCreatorV3One*>(static_cast<IPluginCreatorInterface*>(creator));
}

template <typename Interface>
Interface& capability(void* plugin, PluginCapabilityType type) {
    return *static_cast<Interface*>(static_cast<IPluginV3*>(plugin)->getCapabilityInterface(type));
}

IPluginV3OneBuild& build(void* plugin) { return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD); }

IPluginV3OneRuntime& runtime(void* plugin) {
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

Dims dims_of(std::int32_t rank, std::int64_t const* extents) {
    Dims dims{};
    dims.nbDims = rank;
    std::copy_n(extents, std::clamp(rank, 0, Dims::MAX_DIMS), dims.d);
    return dims;
}

PluginTensorDesc desc_of(HostTensor const& tensor) {
    return {dims_of(tensor.rank, tensor.dims), static_cast<DataType>(tensor.type), TensorFormat::kLINEAR, -1.0F};
}

std::vector<PluginTensorDesc> descs_of(HostTensor const* tensors, int count) {
    std::vector<PluginTensorDesc> descs;
    std::transform(tensors, tensors + count, std::back_inserter(descs), desc_of);
    return descs;
}

std::vector<DynamicPluginTensorDesc> dynamic_descs_of(HostTensor const* tensors, int count) {
    std::vector<DynamicPluginTensorDesc> descs;
    for (auto const* tensor = tensors; tensor != tensors + count; ++tensor) {
        auto const max = dims_of(tensor->rank, tensor->max);
        auto min = dims_of(tensor->rank, tensor->dims);
        std::replace(min.d, min.d + Dims::MAX_DIMS, std::int64_t{-1}, std::int64_t{0});
        descs.push_back({desc_of(*tensor), min, max, max});
    }
    return descs;
}

/// What `action` returns, or `failed` where it throws.
template <typename Result, typename Action>
Result guarded(Result failed, Action const& action) noexcept {
    try {
        return action();
    } catch (...) {
        return failed;
    }
}

}  // namespace

HOST_API void* host_registry() { return registry(); }

HOST_API void* host_load_library(char const* path) {
    auto* const own = registry();
    return own == nullptr ? nullptr : own->loadLibrary(path);
}

HOST_API int host_deregister(void* handle) {
    auto* const own = registry();
    if (own == nullptr || handle == nullptr) return -1;
    own->deregisterLibrary(handle);
    return 0;
}

HOST_API void* host_creator(char const* name, char const* version, char const* name_space) {
    auto* const own = registry();
    return own == nullptr ? nullptr : own->getCreator(name, version, name_space);
}

HOST_API int host_creator_field_count(void* creator) { return as_creator(creator)->getFieldNames()->nbFields; }

HOST_API char const* host_creator_field_name(void* creator, int place) {
    return as_creator(creator)->getFieldNames()->fields[place].name;
}

HOST_API void* host_create(void* creator, HostField const* fields, int count, int phase) {
    return guarded<void*>(nullptr, [&] {
        std::vector<PluginField> list;
        std::transform(fields, fields + count, std::back_inserter(list), [](HostField const& field) {
            return PluginField(field.name, field.data, static_cast<PluginFieldType>(field.type), field.length);
        });
        PluginFieldCollection const collection{count, list.data()};
        return as_creator(creator)->createPlugin("layer", &collection, static_cast<TensorRTPhase>(phase));
    });
}

HOST_API int host_fields(void* plugin, HostField* fields, int capacity) {
    auto const* const given = runtime(plugin).getFieldsToSerialize();
    if (given == nullptr) return -1;
    for (int each = 0; each < std::min(capacity, given->nbFields); ++each) {
        auto const& field = given->fields[each];
        fields[each] = {field.name, field.data, static_cast<std::int32_t>(field.type), field.length};
    }
    return given->nbFields;
}

HOST_API void* host_clone(void* plugin) { return static_cast<IPluginV3*>(plugin)->clone(); }

HOST_API void host_destroy(void* plugin) { delete static_cast<IPluginV3*>(plugin); }

HOST_API int host_supports(void* plugin, HostTensor const* tensors, int inputs, int outputs) {
    return guarded(-1, [&] {
        auto const descs = dynamic_descs_of(tensors, inputs + outputs);
        for (int each = 0; each < inputs + outputs; ++each) {
            if (!build(plugin).supportsFormatCombination(each, descs.data(), inputs, outputs)) return 0;
        }
        return 1;
    });
}

HOST_API int host_output_type(void* plugin, HostTensor const* tensors, int inputs) {
    return guarded(-1, [&] {
        std::vector<DataType> types;
        for (int each = 0; each < inputs; ++each) types.push_back(static_cast<DataType>(tensors[each].type));
        DataType result{};
        auto const error = build(plugin).getOutputDataTypes(&result, 1, types.data(), inputs);
        return error ? -1 : static_cast<int>(result);
    });
}

HOST_API int host_output_dims(void* plugin, HostTensor const* tensors, int inputs, std::int64_t* dims) {
    return guarded(-1, [&] {
        bpkv::test::Calculator calculator;
        std::vector<DimsExprs> given(static_cast<std::size_t>(inputs));
        for (int each = 0; each < inputs; ++each) {
            given[each].nbDims = tensors[each].rank;
            for (int axis = 0; axis < tensors[each].rank; ++axis) {
                given[each].d[axis] = calculator.number(tensors[each].dims[axis]);
            }
        }
        DimsExprs result{};
        if (build(plugin).getOutputShapes(given.data(), inputs, nullptr, 0, &result, 1, calculator)) return -1;
        std::transform(result.d, result.d + result.nbDims, dims, bpkv::test::value_of);
        return result.nbDims;
    });
}

HOST_API int host_configure(void* plugin, HostTensor const* tensors, int inputs, int outputs) {
    return guarded(-1, [&] {
        auto const descs = dynamic_descs_of(tensors, inputs + outputs);
        return build(plugin).configurePlugin(descs.data(), inputs, descs.data() + inputs, outputs);
    });
}

HOST_API std::int64_t host_workspace(void* plugin, HostTensor const* tensors, int inputs, int outputs) {
    return guarded(std::int64_t{-1}, [&] {
        auto const descs = dynamic_descs_of(tensors, inputs + outputs);
        auto const bytes = build(plugin).getWorkspaceSize(descs.data(), inputs, descs.data() + inputs, outputs);
        return static_cast<std::int64_t>(bytes);
    });
}

HOST_API void* host_attach(void* plugin) { return runtime(plugin).attachToContext(nullptr); }

HOST_API int host_shape_change(void* plugin, HostTensor const* tensors, int inputs, int outputs) {
    return guarded(-1, [&] {
        auto const descs = descs_of(tensors, inputs + outputs);
        return runtime(plugin).onShapeChange(descs.data(), inputs, descs.data() + inputs, outputs);
    });
}

HOST_API int host_enqueue(void* plugin, HostTensor const* tensors, int inputs, int outputs, void* const* pointers,
                          void* workspace, void* stream) {
    return guarded(-1, [&] {
        auto const descs = descs_of(tensors, inputs + outputs);
        return runtime(plugin).enqueue(descs.data(), descs.data() + inputs, pointers, pointers + inputs, workspace,
                                       static_cast<cudaStream_t>(stream));
    });
}
