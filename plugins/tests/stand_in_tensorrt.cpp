// A stand-in for libnvinfer: a registry of plugins, and a version that the environment may change.

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <vector>

#define STAND_IN_API extern "C" __attribute__((visibility("default")))

using namespace nvinfer1;

namespace {

class Registry final : public IPluginRegistry {
public:
    bool registerCreator(IPluginCreatorInterface& creator, char const* name_space) noexcept override {
        auto const& own = static_cast<IPluginCreatorV3One&>(creator);
        if (getCreator(own.getPluginName(), own.getPluginVersion(), name_space) != nullptr) return false;
        entries_.push_back({&creator, name_space});
        return true;
    }

    IPluginCreatorInterface* getCreator(char const* name, char const* version,
                                        char const* name_space) noexcept override {
        for (auto const& entry : entries_) {
            auto const& own = static_cast<IPluginCreatorV3One&>(*entry.creator);
            // As the real one: the namespace has to be that of the creator, and that of its registration.
            if (std::strcmp(own.getPluginNamespace(), name_space) != 0) continue;
            if (std::strcmp(own.getPluginName(), name) == 0 && std::strcmp(own.getPluginVersion(), version) == 0 &&
                entry.name_space == name_space) {
                return entry.creator;
            }
        }
        return nullptr;
    }

    bool deregisterCreator(IPluginCreatorInterface const& creator) noexcept override {
        auto const end = std::remove_if(entries_.begin(), entries_.end(),
                                        [&](auto const& entry) { return entry.creator == &creator; });
        bool const found = end != entries_.end();
        entries_.erase(end, entries_.end());
        return found;
    }

    PluginLibraryHandle loadLibrary(char const* path) noexcept override {
        void* const library = dlopen(path, RTLD_NOW);
        auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(std::int32_t&)>(
            library == nullptr ? nullptr : dlsym(library, "getCreators"));
        if (get == nullptr) return nullptr;
        std::int32_t count = 0;
        auto const* const creators = get(count);
        for (std::int32_t each = 0; each < count; ++each) {
            registerCreator(*creators[each], static_cast<IPluginCreatorV3One*>(creators[each])->getPluginNamespace());
        }
        return count == 0 ? nullptr : library;
    }

    void deregisterLibrary(PluginLibraryHandle) noexcept override {}
    void setErrorRecorder(IErrorRecorder*) noexcept override {}
    IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
    bool isParentSearchEnabled() const override { return false; }
    void setParentSearchEnabled(bool) override {}
    IPluginCreatorInterface* const* getAllCreators(std::int32_t*) const noexcept override { return nullptr; }
    IPluginCreatorInterface* const* getAllCreatorsRecursive(std::int32_t*) noexcept override { return nullptr; }
    IPluginResource* acquirePluginResource(char const*, IPluginResource*) noexcept override { return nullptr; }
    std::int32_t releasePluginResource(char const*) noexcept override { return 0; }

    // Of the interface before IPluginV3, which no plugin here has.
    bool registerCreator(IPluginCreator&, char const*) noexcept override { return false; }
    IPluginCreator* const* getPluginCreatorList(std::int32_t*) const noexcept override { return nullptr; }
    IPluginCreator* getPluginCreator(char const*, char const*, char const*) noexcept override { return nullptr; }
    bool deregisterCreator(IPluginCreator const&) noexcept override { return false; }

private:
    struct Entry {
        IPluginCreatorInterface* creator;
        std::string name_space;
    };
    std::vector<Entry> entries_;
};

}  // namespace

STAND_IN_API IPluginRegistry* getPluginRegistry() {
    static auto* const only = new Registry;  // never destroyed, as plugins may be when the process ends
    return only;
}

STAND_IN_API std::int32_t getInferLibMajorVersion() {
    auto const* const told = std::getenv("STAND_IN_TENSORRT_MAJOR");
    return told == nullptr ? NV_TENSORRT_MAJOR : std::atoi(told);
}
