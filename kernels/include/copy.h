// Copies that go past the caches: the arena is far larger than they are, and the engine needs its
// own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.h"
#include "xxh3.h"

namespace kvtier {

inline constexpr size_t kLine = 64;

// Below this a call's bytes are better left in the caches.
inline constexpr size_t kStreamLeast = 512 * 1024;

// Copies by streaming stores; the first and last partial lines of dst by plain ones. The caller
// fences.
void stream_copy(uint8_t* dst, const uint8_t* src, size_t n);

// The plain streaming loop, nothing tuned: what the other copies are measured against.
void nt_loop(uint8_t* dst, const uint8_t* src, size_t n);

// Makes streamed lines visible before anything that is stored later.
void stream_fence();

#if KVTIER_X86
extern const StripeKernels kStripesAvx2, kStripesAvx512;
// dst is line-aligned; n counts lines.
void lines_avx2(uint8_t* dst, const uint8_t* src, size_t n);
void lines_avx512(uint8_t* dst, const uint8_t* src, size_t n);
void plain_lines_avx2(uint8_t* dst, const uint8_t* src, size_t n);
void plain_lines_avx512(uint8_t* dst, const uint8_t* src, size_t n);
#endif

}  // namespace kvtier
