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

// How far ahead lines are asked for where a source is made of pieces. Of 512 bytes to 24 KiB this
// was as good as any on Zen 5; a gather of 32 KiB pieces goes from 0.68 to 0.75-0.81 of one long
// range.
inline constexpr size_t kAhead = 4096;

// Copies by streaming stores; the first and last partial lines of dst by plain ones. The caller
// fences. `next` is where the source goes on after these bytes, or null if it ends or is one range.
void stream_copy(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* next = nullptr);

// The plain streaming loop, which whole blocks and pieces are measured against.
void nt_loop(uint8_t* dst, const uint8_t* src, size_t n);

// Makes streamed lines visible before anything that is stored later.
void stream_fence();

#if KVTIER_X86
extern const StripeKernels kStripesAvx2, kStripesAvx512;
// dst is line-aligned; n counts lines. Asks for a line at `ahead`, which advances, with every line.
void lines_avx2(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* ahead);
void lines_avx512(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* ahead);
#endif

}  // namespace kvtier
