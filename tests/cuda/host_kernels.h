// The part of CUDA's language that is needed to compile kernels for the host. Threads of
// copy_blocks are independent; a call of the codecs' kernels is a warp, whose lanes lanes.h
// implements.
#pragma once

#include <algorithm>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct Place {
    unsigned x;
};
inline thread_local Place threadIdx, blockIdx, blockDim, gridDim;

// Runs the threads of a kernel in a loop, or every kStep-th of them.
template <unsigned kStep = 1, typename Kernel, typename... Arguments>
void run_on_host(unsigned grid, unsigned threads, const Kernel& kernel, Arguments... arguments) {
    gridDim.x = grid;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x += kStep) kernel(arguments...);
    }
}

#include "kernel_texts.h"
