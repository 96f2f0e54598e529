#include "log.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace bpkv {

namespace {

/// A line of bounded length.
class Line {
public:
    void append(std::string_view part) noexcept {
        auto const room = text_.size() - 1 - length_;
        auto const copied = std::min(room, part.size());
        std::transform(part.begin(), part.begin() + copied, text_.begin() + length_,
                       [](char each) { return each < ' ' || each > '~' ? '?' : each; });
        length_ += copied;
    }

    char const* c_str() const noexcept { return text_.data(); }

private:
    std::array<char, 1001> text_{};  // zeros: always ended
    std::size_t length_ = 0;
};

}  // namespace

void Log::error(std::string_view where, std::string_view what) const noexcept {
    Line line;
    for (auto const part : {std::string_view("bpkv: "), where, std::string_view(": "), what}) line.append(part);
    if (auto* const found = logger()) {
        found->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
    } else {
        std::fprintf(stderr, "%s\n", line.c_str());
    }
}

nvinfer1::ILogger* Log::logger() const noexcept {
    try {
        if (auto* const finder = finder_.load()) {
            if (auto* const found = finder->findLogger()) return found;
        }
    } catch (...) {  // the application's own code, which may throw: the line must not be lost for it
    }
    return logger_;
}

}  // namespace bpkv
