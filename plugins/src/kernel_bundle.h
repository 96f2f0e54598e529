#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "geometry.h"
#include "score_kernels.h"
#include "target.h"

namespace bpkv {

inline constexpr std::uint32_t most_hidden_arguments = 8;

/// One cubin and how it is launched.
struct Kernel {
    ScoreKernel name;
    std::uint32_t threads;
    std::uint32_t shared_bytes;      // dynamic shared memory
    std::uint32_t hidden_arguments;  // null pointers that follow the arguments
    std::vector<Argument> arguments;
    std::int32_t block = 0;    // positions at a time; 0 for a kernel without blocks
    std::int32_t tile = 0;     // entries, or (channel, head) pairs, of a program
    std::int32_t splits = 0;   // the most partials that are combined
    std::int32_t columns = 0;  // of a program
    std::string_view image;
};

/// All that one target needs: every kernel, and those with blocks for each of `blocks`.
struct TargetKernels {
    Target target;
    std::vector<Kernel> kernels;
    std::vector<std::int32_t> blocks;  // ascending

    /// `block` is 0 for a kernel without blocks.
    Kernel const& get(ScoreKernel name, std::int32_t block) const { return kernels[place(name, block)]; }
    std::size_t place(ScoreKernel name, std::int32_t block) const;
};

/// Kernels compiled ahead of time, for all targets of an engine.
class KernelBundle {
public:
    /// Reads a copy of the bytes; raises Refusal for what is damaged, incomplete or made for other code than this.
    explicit KernelBundle(std::string_view bytes);
    KernelBundle(KernelBundle const&) = delete;
    KernelBundle& operator=(KernelBundle const&) = delete;

    std::string_view bytes() const { return bytes_; }
    Geometry const& geometry() const { return geometry_; }
    std::int32_t rows_per_split() const { return rows_per_split_; }

    /// On whatever target.
    std::int32_t most_splits() const;

    /// Raises Refusal where nothing here runs on the device.
    TargetKernels const& for_device(Capability device) const;

private:
    std::string const bytes_;
    Geometry geometry_;
    std::int32_t rows_per_split_ = 0;
    std::vector<TargetKernels> targets_;
};

}  // namespace bpkv
