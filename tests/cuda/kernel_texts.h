// The source of the kernels, and the codecs' kernels by name.
#pragma once

#include "../../kernels/cuda/codec_calibrated.cu"
#include "../../kernels/cuda/codec_lossless.cu"
#include "../../kernels/cuda/codec_quantized.cu"
#include "../../kernels/cuda/copy_blocks.cu"
#include "../../kernels/cuda/digest.cu"

// The codecs' kernels, which have the same parameters.
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
