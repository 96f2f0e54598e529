#pragma once

#include "kernel_sets.h"
#include "log.h"
#include "nvtx_domain.h"

namespace bpkv {

/// What all plugins of a creator share.
struct Services {
    Log log;
    KernelSets kernel_sets;
    NvtxDomain nvtx;
};

}  // namespace bpkv
