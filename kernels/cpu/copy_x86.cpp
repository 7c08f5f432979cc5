// Streaming copies and XXH3 stripes for AVX2 and AVX-512.
#include "cpu.h"

#if KVTIER_X86
#include <immintrin.h>

#include "copy.h"
#include "xxh3.h"

namespace kvtier {
namespace {

#define KVTIER_INLINE inline __attribute__((always_inline))

// How far ahead of the loads. The processor's own prefetchers stop at a page's end; this doesn't.
constexpr size_t kAhead = 1024;

KVTIER_INLINE void ahead(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p + kAhead), _MM_HINT_T0);
}

// What happens to a stripe's line beside being taken in.
enum class Line { kLeave, kStream, kStreamShifted };

struct Wide512 {
    __m512i acc;

    KVTIER_AVX512 KVTIER_INLINE void load(const Accumulators& from) {
        acc = _mm512_load_si512(from.lane);
    }
    KVTIER_AVX512 KVTIER_INLINE void save(Accumulators& to) const {
        _mm512_store_si512(to.lane, acc);
    }
    template <Line kLineIs>
    KVTIER_AVX512 KVTIER_INLINE void take(uint8_t* dst, const uint8_t* src, size_t lead,
                                          const uint8_t* secret) {
        const __m512i data = _mm512_loadu_si512(src);
        if constexpr (kLineIs == Line::kStream) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), data);
        } else if constexpr (kLineIs == Line::kStreamShifted) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + lead),
                                _mm512_loadu_si512(src + lead));
        }
        const __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
        const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
        const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
        acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
    }
    KVTIER_AVX512 KVTIER_INLINE void scramble(const uint8_t* key) {
        const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)),
                                               _mm512_loadu_si512(key));
        acc = _mm512_mullo_epi64(mixed, _mm512_set1_epi64(kPrime32First));
    }
};

struct Wide256 {
    __m256i acc[2];

    KVTIER_AVX2 KVTIER_INLINE void load(const Accumulators& from) {
        for (int h = 0; h < 2; h++) {
            acc[h] = _mm256_load_si256(reinterpret_cast<const __m256i*>(from.lane + 4 * h));
        }
    }
    KVTIER_AVX2 KVTIER_INLINE void save(Accumulators& to) const {
        for (int h = 0; h < 2; h++) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(to.lane + 4 * h), acc[h]);
        }
    }
    static KVTIER_AVX2 KVTIER_INLINE __m256i at(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    template <Line kLineIs>
    KVTIER_AVX2 KVTIER_INLINE void take(uint8_t* dst, const uint8_t* src, size_t lead,
                                        const uint8_t* secret) {
        for (int h = 0; h < 2; h++) {
            const __m256i data = at(src + 32 * h);
            if constexpr (kLineIs == Line::kStream) {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32 * h), data);
            } else if constexpr (kLineIs == Line::kStreamShifted) {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + lead + 32 * h),
                                    at(src + lead + 32 * h));
            }
            const __m256i keyed = _mm256_xor_si256(data, at(secret + 32 * h));
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
            acc[h] = _mm256_add_epi64(acc[h], _mm256_add_epi64(product, swapped));
        }
    }
    KVTIER_AVX2 KVTIER_INLINE void scramble(const uint8_t* key) {
        const __m256i prime = _mm256_set1_epi64x(kPrime32First);
        for (int h = 0; h < 2; h++) {
            const __m256i mixed = _mm256_xor_si256(
                _mm256_xor_si256(acc[h], _mm256_srli_epi64(acc[h], 47)), at(key + 32 * h));
            // No 64-bit product here: two of 32 bits, as the prime has no upper half.
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            acc[h] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
};

// The loop over stripes; written once, compiled for each width.
#define KVTIER_TAKE_LOOP(Width, TARGET)                                                            \
    template <Line kLineIs>                                                                        \
    TARGET size_t take_loop(const Width*, Accumulators& acc, uint8_t* dst, const uint8_t* src,     \
                            size_t lead, size_t stripes, size_t position, const uint8_t* secret) { \
        const uint8_t* const key = secret + kSecretBytes - kStripe;                                \
        Width state;                                                                               \
        state.load(acc);                                                                           \
        while (stripes != 0) {                                                                     \
            if (position == 0 && stripes >= kStripesPerRun) {                                      \
                _Pragma("GCC unroll 16") for (size_t k = 0; k < kStripesPerRun; k++) {             \
                    ahead(src + kStripe * k);                                                      \
                    state.template take<kLineIs>(dst + kStripe * k, src + kStripe * k, lead,       \
                                                 secret + 8 * k);                                  \
                }                                                                                  \
                state.scramble(key);                                                               \
                dst += kStripe * kStripesPerRun, src += kStripe * kStripesPerRun;                  \
                stripes -= kStripesPerRun;                                                         \
                continue;                                                                          \
            }                                                                                      \
            state.template take<kLineIs>(dst, src, lead, secret + 8 * position);                   \
            dst += kStripe, src += kStripe, stripes--;                                             \
            if (++position == kStripesPerRun) {                                                    \
                state.scramble(key);                                                               \
                position = 0;                                                                      \
            }                                                                                      \
        }                                                                                          \
        state.save(acc);                                                                           \
        return position;                                                                           \
    }

KVTIER_TAKE_LOOP(Wide512, KVTIER_AVX512)
KVTIER_TAKE_LOOP(Wide256, KVTIER_AVX2)
#undef KVTIER_TAKE_LOOP

template <typename Width>
size_t take(Accumulators& acc, const uint8_t* src, size_t stripes, size_t position,
            const uint8_t* secret) {
    return take_loop<Line::kLeave>(static_cast<const Width*>(nullptr), acc, nullptr, src, 0,
                                   stripes, position, secret);
}

template <typename Width>
size_t take_and_stream(Accumulators& acc, uint8_t* dst, const uint8_t* src, size_t lead,
                       size_t stripes, size_t position, const uint8_t* secret) {
    if (lead == 0) {
        return take_loop<Line::kStream>(static_cast<const Width*>(nullptr), acc, dst, src, 0,
                                        stripes, position, secret);
    }
    return take_loop<Line::kStreamShifted>(static_cast<const Width*>(nullptr), acc, dst, src, lead,
                                           stripes, position, secret);
}

}  // namespace

const StripeKernels kStripesAvx512 = {take<Wide512>, take_and_stream<Wide512>};
const StripeKernels kStripesAvx2 = {take<Wide256>, take_and_stream<Wide256>};

KVTIER_AVX512 void lines_avx512(uint8_t* dst, const uint8_t* src, size_t n) {
    for (; n >= 4; n -= 4, dst += 4 * kLine, src += 4 * kLine) {
        for (int k = 0; k < 4; k++) ahead(src + kLine * k);
        const __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + kLine);
        const __m512i c = _mm512_loadu_si512(src + 2 * kLine);
        const __m512i d = _mm512_loadu_si512(src + 3 * kLine);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + kLine), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 2 * kLine), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 3 * kLine), d);
    }
    plain_lines_avx512(dst, src, n);
}

KVTIER_AVX2 void lines_avx2(uint8_t* dst, const uint8_t* src, size_t n) {
    for (; n >= 2; n -= 2, dst += 2 * kLine, src += 2 * kLine) {
        for (int k = 0; k < 2; k++) ahead(src + kLine * k);
        const __m256i a = Wide256::at(src), b = Wide256::at(src + 32);
        const __m256i c = Wide256::at(src + 64), d = Wide256::at(src + 96);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 64), c);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 96), d);
    }
    plain_lines_avx2(dst, src, n);
}

KVTIER_AVX512 void plain_lines_avx512(uint8_t* dst, const uint8_t* src, size_t n) {
    for (; n != 0; n--, dst += kLine, src += kLine) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
    }
}

KVTIER_AVX2 void plain_lines_avx2(uint8_t* dst, const uint8_t* src, size_t n) {
    for (; n != 0; n--, dst += kLine, src += kLine) {
        const __m256i a = Wide256::at(src), b = Wide256::at(src + 32);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
    }
}

}  // namespace kvtier
#endif
