#include "kernel_set.h"

#include "checksum.h"
#include "refusal.h"

namespace bpkv {

void KernelSet::carry(std::string_view bytes) {
    if (auto const given = checksum_of(bytes); given != checksum_) {
        throw Refusal("the kernels have checksum ", given, " and field kernels_checksum is ", checksum_,
                      "; the kernels are damaged, or the field is of others: give both from one bundle.");
    }
    std::lock_guard const lock(mutex_);
    if (bundle_ == nullptr) {
        bundle_ = std::make_unique<KernelBundle const>(bytes);
    } else if (bundle_->bytes() != bytes) {
        throw Refusal("other kernels of checksum ", checksum_, " are in use; compile these once more.");
    }
}

KernelBundle const& KernelSet::bundle() const {
    std::lock_guard const lock(mutex_);
    if (bundle_ == nullptr) {
        throw Refusal("no layer carries the kernels of checksum ", checksum_,
                      "; give the field kernels to one layer of the network, and keep that layer.");
    }
    return *bundle_;
}

LoadedKernels const& KernelSet::on_current_device() {
    auto const& kernels = bundle();
    std::lock_guard const lock(mutex_);
    if (!driver_) driver_ = CudaDriver::open();
    auto const device = driver_->current_device();
    auto const found = devices_.find(device);
    if (found != devices_.end()) return found->second;
    return devices_.try_emplace(device, *driver_, device, kernels).first->second;
}

}  // namespace bpkv
