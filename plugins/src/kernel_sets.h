#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "kernel_set.h"

namespace bpkv {

/// All kernel sets that some layer uses, by checksum. Thread-safe.
class KernelSets {
public:
    /// The one that layers of this checksum share, made if there is none. It lives as long as any of them.
    std::shared_ptr<KernelSet> get(std::int64_t checksum) {
        std::lock_guard const lock(mutex_);
        for (auto each = sets_.begin(); each != sets_.end();) {  // what nobody uses any more
            each = each->second.expired() ? sets_.erase(each) : std::next(each);
        }
        auto& slot = sets_[checksum];
        auto set = slot.lock();
        if (set == nullptr) slot = set = std::make_shared<KernelSet>(checksum);
        return set;
    }

private:
    std::mutex mutex_;
    std::map<std::int64_t, std::weak_ptr<KernelSet>> sets_;
};

}  // namespace bpkv
