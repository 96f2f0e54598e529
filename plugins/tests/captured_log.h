#pragma once

#include <NvInferRuntime.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace bpkv::test {

/// Keeps the lines that are logged.
class CapturedLog final : public nvinfer1::ILogger {
public:
    void log(Severity severity, char const* line) noexcept override {
        std::lock_guard const lock(mutex_);
        if (severity == Severity::kERROR) lines_.emplace_back(line);
    }

    /// Those since the last call.
    std::vector<std::string> take() {
        std::lock_guard const lock(mutex_);
        return std::exchange(lines_, {});
    }

    /// Whether there was just one line since the last call, as all begin, which has all of these words.
    template <typename... Words>
    bool told(Words const&... words) {
        auto const lines = take();
        if (lines.size() != 1 || lines[0].rfind("bpkv: ", 0) != 0) return false;
        return ((lines[0].find(words) != std::string::npos) && ...);
    }

private:
    std::mutex mutex_;
    std::vector<std::string> lines_;
};

}  // namespace bpkv::test
