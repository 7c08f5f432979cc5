// Streaming copies and XXH3 stripes for AVX2 and AVX-512.
#include "cpu.h"

#if KVTIER_X86
#include <immintrin.h>

#include "copy.h"
#include "xxh3.h"
#include "xxh3_x86.h"

namespace kvtier {
namespace {

// What happens to the line of a stripe in addition to hashing it.
enum class Line { kLeave, kStream, kStreamAhead, kStreamShifted };

struct Wide512 : Stripes512 {
    template <Line kLineIs>
    KVTIER_AVX512 KVTIER_INLINE void take(uint8_t* dst, const uint8_t* src, size_t lead,
                                          const uint8_t* secret) {
        const __m512i data = _mm512_loadu_si512(src);
        if constexpr (kLineIs == Line::kStream || kLineIs == Line::kStreamAhead) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), data);
        } else if constexpr (kLineIs == Line::kStreamShifted) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + lead),
                                _mm512_loadu_si512(src + lead));
        }
        add(data, secret);
    }
};

struct Wide256 : Stripes256 {
    template <Line kLineIs>
    KVTIER_AVX2 KVTIER_INLINE void take(uint8_t* dst, const uint8_t* src, size_t lead,
                                        const uint8_t* secret) {
        for (size_t h = 0; h < 2; h++) {
            const __m256i data = at(src + 32 * h);
            if constexpr (kLineIs == Line::kStream || kLineIs == Line::kStreamAhead) {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32 * h), data);
            } else if constexpr (kLineIs == Line::kStreamShifted) {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + lead + 32 * h),
                                    at(src + lead + 32 * h));
            }
            add(h, data, secret);
        }
    }
};

// Each line is read once: it does not have to enter the second cache.
KVTIER_INLINE void fetch(const uint8_t* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_NTA);
}

// The loop over stripes, compiled for each width.
#define KVTIER_TAKE_LOOP(Width, TARGET)                                                          \
    template <Line kLineIs>                                                                      \
    TARGET size_t take_loop(const Width*, Accumulators& acc, uint8_t* dst, const uint8_t* src,   \
                            size_t lead, size_t stripes, size_t position, const uint8_t* secret, \
                            const uint8_t* ahead) {                                              \
        const uint8_t* const key = secret + kSecretBytes - kStripe;                              \
        Width state;                                                                             \
        state.load(acc);                                                                         \
        while (stripes != 0) {                                                                   \
            if (position == 0 && stripes >= kStripesPerRun) {                                    \
                _Pragma("GCC unroll 16") for (size_t k = 0; k < kStripesPerRun; k++) {           \
                    if constexpr (kLineIs == Line::kStreamAhead) fetch(ahead + kStripe * k);     \
                    state.template take<kLineIs>(dst + kStripe * k, src + kStripe * k, lead,     \
                                                 secret + 8 * k);                                \
                }                                                                                \
                state.scramble(key);                                                             \
                dst += kStripe * kStripesPerRun, src += kStripe * kStripesPerRun;                \
                ahead += kStripe * kStripesPerRun;                                               \
                stripes -= kStripesPerRun;                                                       \
                continue;                                                                        \
            }                                                                                    \
            if constexpr (kLineIs == Line::kStreamAhead) fetch(ahead);                           \
            state.template take<kLineIs>(dst, src, lead, secret + 8 * position);                 \
            dst += kStripe, src += kStripe, ahead += kStripe, stripes--;                         \
            if (++position == kStripesPerRun) {                                                  \
                state.scramble(key);                                                             \
                position = 0;                                                                    \
            }                                                                                    \
        }                                                                                        \
        state.save(acc);                                                                         \
        return position;                                                                         \
    }

KVTIER_TAKE_LOOP(Wide512, KVTIER_AVX512)
KVTIER_TAKE_LOOP(Wide256, KVTIER_AVX2)
#undef KVTIER_TAKE_LOOP

template <typename Width>
size_t take(Accumulators& acc, const uint8_t* src, size_t stripes, size_t position,
            const uint8_t* secret) {
    constexpr const Width* width = nullptr;
    return take_loop<Line::kLeave>(width, acc, nullptr, src, 0, stripes, position, secret, src);
}

template <typename Width>
size_t take_and_stream(Accumulators& acc, uint8_t* dst, const uint8_t* src, size_t lead,
                       size_t stripes, size_t position, const uint8_t* secret,
                       const uint8_t* ahead) {
    constexpr const Width* width = nullptr;
    if (lead != 0) {
        return take_loop<Line::kStreamShifted>(width, acc, dst, src, lead, stripes, position,
                                               secret, src);
    }
    if (ahead != nullptr) {
        return take_loop<Line::kStreamAhead>(width, acc, dst, src, 0, stripes, position, secret,
                                             ahead);
    }
    return take_loop<Line::kStream>(width, acc, dst, src, 0, stripes, position, secret, src);
}

}  // namespace

const StripeKernels kStripesAvx512 = {take<Wide512>, take_and_stream<Wide512>};
const StripeKernels kStripesAvx2 = {take<Wide256>, take_and_stream<Wide256>};

// One line at a time. Within a contiguous range on Zen 5, groups of 2 to 16 lines are 3 to 17
// percent slower, a prefetch with each line, 512 bytes to 8 KiB ahead, 4 to 32 percent, and
// touching the next pages makes no difference. Between pieces a prefetch helps: see kAhead.
KVTIER_AVX512 void lines_avx512(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* ahead) {
    for (; n != 0; n--, dst += kLine, src += kLine) {
        if (ahead != nullptr) fetch(ahead), ahead += kLine;
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
    }
}

KVTIER_AVX2 void lines_avx2(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* ahead) {
    for (; n != 0; n--, dst += kLine, src += kLine) {
        if (ahead != nullptr) fetch(ahead), ahead += kLine;
        const __m256i a = Wide256::at(src), b = Wide256::at(src + 32);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
    }
}

}  // namespace kvtier
#endif
