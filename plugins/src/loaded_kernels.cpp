#include "loaded_kernels.h"

namespace bpkv {

namespace {

constexpr std::uint32_t shared_bytes_without_asking = 48 * 1024;

}  // namespace

LoadedKernels::LoadedKernels(CudaDriver const& driver, int device, KernelBundle const& bundle)
    : driver_(driver), target_(bundle.for_device(driver.capability(device))) {
    for (auto const& kernel : target_.kernels) {
        libraries_.emplace_back(driver, kernel.image.data());
        kernels_.push_back(driver.kernel(libraries_.back().handle(), name_of(kernel.name)));
        if (kernel.shared_bytes > shared_bytes_without_asking) {
            driver.allow_shared_bytes(kernels_.back(), device, static_cast<int>(kernel.shared_bytes));
        }
        driver.load_now(kernels_.back());
    }
}

void LoadedKernels::launch(Launch const& launch, ScoreArguments& arguments, CUstream stream) const {
    auto const place = target_.place(launch.kernel, launch.block);
    auto const& kernel = target_.kernels[place];
    auto parameters = arguments.parameters_of(kernel);
    auto const& grid = launch.grid;
    driver_.launch(kernels_[place], {grid.x, grid.y, grid.z, kernel.threads, kernel.shared_bytes}, stream,
                   parameters.data());
}

}  // namespace bpkv
