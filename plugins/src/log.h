#pragma once

#include <NvInferRuntime.h>

#include <atomic>
#include <exception>
#include <new>
#include <string_view>

namespace bpkv {

/// Where lines of an error go: to the logger that TensorRT names, else to the one of `initBpkvPlugins`, else to stderr.
///
/// Thread-safe. Nothing is allocated, so that running out of memory can be told.
class Log {
public:
    void use(nvinfer1::ILoggerFinder* finder) noexcept { finder_ = finder; }
    void use(nvinfer1::ILogger* logger) noexcept { logger_ = logger; }

    /// One line "bpkv: where: what"; what does not print becomes '?', and what is beyond 1000 bytes is cut off.
    void error(std::string_view where, std::string_view what) const noexcept;

private:
    nvinfer1::ILogger* logger() const noexcept;

    std::atomic<nvinfer1::ILoggerFinder*> finder_{nullptr};
    std::atomic<nvinfer1::ILogger*> logger_{nullptr};
};

/// What `action` returns; where it throws, the reason is logged and `failed` returned. No exception may reach TensorRT.
template <typename Result, typename Action>
Result guarded(Log const& log, std::string_view where, Result failed, Action const& action) noexcept {
    try {
        return action();
    } catch (std::bad_alloc const&) {
        log.error(where, "out of memory; give the process more, or load fewer engines.");
    } catch (std::exception const& error) {
        log.error(where, error.what());
    } catch (...) {
        log.error(where, "an unknown error.");
    }
    return failed;
}

}  // namespace bpkv
