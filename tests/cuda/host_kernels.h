// Enough of CUDA's language to compile kernels for the host. Threads of copy_blocks know nothing of
// each other; of the codecs' a call is a warp, whose lanes are lanes.h's business.
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

// Runs a kernel's threads, or every so many of them, one after the other.
template <unsigned kStep = 1, typename Kernel, typename... Arguments>
void run_on_host(unsigned grid, unsigned threads, const Kernel& kernel, Arguments... arguments) {
    gridDim.x = grid;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x += kStep) kernel(arguments...);
    }
}

#include "../../kernels/cuda/codec_calibrated.cu"
#include "../../kernels/cuda/codec_lossless.cu"
#include "../../kernels/cuda/codec_quantized.cu"
#include "../../kernels/cuda/copy_blocks.cu"

// Those of the codecs, which all take the same.
struct CodecKernel {
    using Call = void(const kvtier::cuda::Part*, const uint32_t*, uint32_t, kvtier::cuda::Measure*,
                      kvtier::cuda::Result*);
    const char* name;
    Call* call;
};
inline constexpr CodecKernel kCodecKernels[] = {
#define KVTIER_NAMED(SPACE, NAME) {#NAME, kvtier::cuda::SPACE::NAME}
    KVTIER_NAMED(lossless, kvtier_fix4_count),
    KVTIER_NAMED(lossless, kvtier_fix4_decode),
    KVTIER_NAMED(lossless, kvtier_fix4_begin),
    KVTIER_NAMED(lossless, kvtier_fix4_measure),
    KVTIER_NAMED(lossless, kvtier_fix4_place),
    KVTIER_NAMED(lossless, kvtier_r32_decode),
    KVTIER_NAMED(lossless, kvtier_r32_begin),
    KVTIER_NAMED(lossless, kvtier_r32_measure),
    KVTIER_NAMED(lossless, kvtier_r32_place),
    KVTIER_NAMED(quantized, kvtier_quantized_decode),
    KVTIER_NAMED(quantized, kvtier_quantized_measure),
    KVTIER_NAMED(quantized, kvtier_quantized_place),
    KVTIER_NAMED(calibrated, kvtier_calibrated_numbers),
    KVTIER_NAMED(calibrated, kvtier_calibrated_values),
    KVTIER_NAMED(calibrated, kvtier_calibrated_measure),
    KVTIER_NAMED(calibrated, kvtier_calibrated_place),
#undef KVTIER_NAMED
    {"kvtier_settle", kvtier::cuda::kvtier_settle},
};
