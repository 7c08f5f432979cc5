// Copies that bypass the caches, by the chosen implementation.
#include "copy.h"

#include <algorithm>
#include <cstring>

#if KVTIER_X86
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

using Lines = void (*)(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* ahead);

Lines chosen_lines() {
#if KVTIER_X86
    const Level level = copy_choice().level();
    if (level == Level::kAvx512) return lines_avx512;
    if (level == Level::kAvx2) return lines_avx2;
#endif
    return [](uint8_t* dst, const uint8_t* src, size_t n, const uint8_t*) {
        std::memcpy(dst, src, n * kLine);
    };
}

}  // namespace

void stream_copy(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* next) {
    const Lines lines = chosen_lines();
    const size_t head = std::min(n, (0 - reinterpret_cast<uintptr_t>(dst)) & (kLine - 1));
    std::memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    const size_t whole = n / kLine;
    const size_t last = next == nullptr ? 0 : std::min(whole, kAhead / kLine);
    const size_t first = whole - last;
    for (size_t at = 0; at < first; at += kPageLines) {
        const size_t some = std::min(first - at, kPageLines);
        const uint8_t* const from = src + at * kLine;
        prefetch_pages(dst + at * kLine + kPagesAhead, some * kLine);
        lines(dst + at * kLine, from, some, next == nullptr ? nullptr : from + kAhead);
    }
    lines(dst + first * kLine, src + first * kLine, last, next);
    std::memcpy(dst + whole * kLine, src + whole * kLine, n - whole * kLine);
}

void stream_fence() {
#if KVTIER_X86
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

}  // namespace kvtier
