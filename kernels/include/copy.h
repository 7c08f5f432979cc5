// Copies that bypass the caches, which are far smaller than the arena and needed by the engine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.h"
#include "page.h"
#include "xxh3.h"

namespace kvtier {

inline constexpr size_t kLine = 64;

// Smaller copies leave their bytes in the caches.
inline constexpr size_t kStreamLeast = 512 * 1024;

// How far ahead lines are prefetched if a source consists of pieces. Among 512 bytes to 24 KiB, no
// distance was better than this one on Zen 5. With it, a gather of 32 KiB pieces improves from 0.68
// to 0.75-0.81 of the speed of one contiguous range.
inline constexpr size_t kAhead = 4096;

// Prefetches one line of each page that begins in these bytes: a streaming store that waits for the
// address of its page delays all later ones. With pages of 4 KiB in a virtual machine, copies and
// decoders are a fifth faster. A prefetch is harmless at any address.
inline constexpr size_t kPagesAhead = 2 * kPage, kPageLines = kPage / kLine;
inline void prefetch_pages(const uint8_t* at, size_t nbytes) {
    for (size_t page = (0 - reinterpret_cast<uintptr_t>(at)) % kPage; page < nbytes;
         page += kPage) {
        __builtin_prefetch(at + page);
    }
}

// Copies by streaming stores; partial lines at both ends of dst by ordinary ones. The caller issues
// the fence. `next`: where the source continues after these bytes, or null.
void stream_copy(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* next = nullptr);

// Makes streamed lines visible before all later stores.
void stream_fence();

#if KVTIER_X86
extern const StripeKernels kStripesAvx2, kStripesAvx512;
// dst is line-aligned; n is a number of lines. Prefetches `ahead`, which advances, with each line.
void lines_avx2(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* ahead);
void lines_avx512(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* ahead);
#endif

}  // namespace kvtier
