// Enough of CUDA's language to compile kernels for the host, whose threads know nothing of each
// other.
#pragma once

#include <algorithm>

#define __device__
#define __global__
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct Place {
    unsigned x;
};
inline thread_local Place threadIdx, blockIdx, blockDim, gridDim;

// Runs a kernel's threads one after the other.
template <typename Kernel, typename... Arguments>
void run_on_host(unsigned grid, unsigned threads, const Kernel& kernel, Arguments... arguments) {
    gridDim.x = grid;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(arguments...);
    }
}

#include "../../kernels/cuda/copy_blocks.cu"
