// Copies past the caches, by the chosen implementation, and what they are measured against.
#include "copy.h"

#include <algorithm>
#include <cstring>

#if KVTIER_X86
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

using Lines = void (*)(uint8_t* dst, const uint8_t* src, size_t n);

void by_lines(Lines lines, uint8_t* dst, const uint8_t* src, size_t n) {
    const size_t head = std::min(n, (0 - reinterpret_cast<uintptr_t>(dst)) & (kLine - 1));
    std::memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    lines(dst, src, n / kLine);
    const size_t done = n / kLine * kLine;
    std::memcpy(dst + done, src + done, n - done);
}

}  // namespace

void stream_copy(uint8_t* dst, const uint8_t* src, size_t n) {
#if KVTIER_X86
    const Level level = copy_choice().level();
    if (level == Level::kAvx512) return by_lines(lines_avx512, dst, src, n);
    if (level == Level::kAvx2) return by_lines(lines_avx2, dst, src, n);
#endif
    std::memcpy(dst, src, n);
}

void nt_loop(uint8_t* dst, const uint8_t* src, size_t n) {
#if KVTIER_X86
    const Level level = copy_choice().level();
    if (level == Level::kAvx512) return by_lines(plain_lines_avx512, dst, src, n);
    if (level == Level::kAvx2) return by_lines(plain_lines_avx2, dst, src, n);
#endif
    std::memcpy(dst, src, n);
}

void stream_fence() {
#if KVTIER_X86
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

}  // namespace kvtier
