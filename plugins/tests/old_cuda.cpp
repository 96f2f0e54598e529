// A driver from before CUDA 12, as far as that can be seen: it has no libraries of kernels.

#include <cuda.h>

extern "C" __attribute__((visibility("default"))) CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
