// BLAKE3's compression function, a row of the state in one register, for SSE4.1 and AVX-512VL.
#include "blake3.h"

#if KVTIER_X86
#include <immintrin.h>

namespace kvtier::blake3 {
namespace {

#define KVTIER_INLINE inline __attribute__((always_inline))

// The message words of each round: the first and the second operands of the four columns, then of
// the diagonals. To form the diagonals, a, c and d are rotated. b is on the critical path and is
// not rotated; the lanes of the other rows start one lane earlier instead.
struct RowOrder {
    alignas(32) uint32_t columns[7][8];    // x of the columns, then y
    alignas(32) uint32_t diagonals[7][8];  // x of the diagonals, then y
};

constexpr RowOrder make_row_order() {
    RowOrder o{};
    for (int r = 0; r < 7; r++) {
        for (int i = 0; i < 4; i++) {
            o.columns[r][i] = kSchedule.word[r][2 * i];
            o.columns[r][4 + i] = kSchedule.word[r][2 * i + 1];
            const int lane = (i + 1) % 4;
            o.diagonals[r][lane] = kSchedule.word[r][8 + 2 * i];
            o.diagonals[r][4 + lane] = kSchedule.word[r][8 + 2 * i + 1];
        }
    }
    return o;
}

constexpr RowOrder kRowOrder = make_row_order();

KVTIER_SSE41 KVTIER_INLINE __m128i row(const uint32_t* words) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(words));
}

// Gathers message words into one register by their numbers.
KVTIER_SSE41 KVTIER_INLINE __m128i picked(const uint32_t* m, const uint32_t* at) {
    return _mm_set_epi32(static_cast<int>(m[at[3]]), static_cast<int>(m[at[2]]),
                         static_cast<int>(m[at[1]]), static_cast<int>(m[at[0]]));
}

template <int kBits>
KVTIER_SSE41 KVTIER_INLINE __m128i turned_sse(__m128i v) {
    return _mm_or_si128(_mm_srli_epi32(v, kBits), _mm_slli_epi32(v, 32 - kBits));
}

template <>
KVTIER_SSE41 KVTIER_INLINE __m128i turned_sse<16>(__m128i v) {
    return _mm_shuffle_epi8(v, _mm_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2));
}

template <>
KVTIER_SSE41 KVTIER_INLINE __m128i turned_sse<8>(__m128i v) {
    return _mm_shuffle_epi8(v, _mm_set_epi8(12, 15, 14, 13, 8, 11, 10, 9, 4, 7, 6, 5, 0, 3, 2, 1));
}

struct Rows {
    __m128i a, b, c, d;
};

KVTIER_SSE41 KVTIER_INLINE void mix_sse(Rows& v, __m128i x, __m128i y) {
    v.a = _mm_add_epi32(_mm_add_epi32(v.a, x), v.b);
    v.d = turned_sse<16>(_mm_xor_si128(v.d, v.a));
    v.c = _mm_add_epi32(v.c, v.d);
    v.b = turned_sse<12>(_mm_xor_si128(v.b, v.c));
    v.a = _mm_add_epi32(_mm_add_epi32(v.a, y), v.b);
    v.d = turned_sse<8>(_mm_xor_si128(v.d, v.a));
    v.c = _mm_add_epi32(v.c, v.d);
    v.b = turned_sse<7>(_mm_xor_si128(v.b, v.c));
}

KVTIER_AVX512 KVTIER_INLINE void mix_avx512(Rows& v, __m128i x, __m128i y) {
    v.a = _mm_add_epi32(_mm_add_epi32(v.a, x), v.b);
    v.d = _mm_ror_epi32(_mm_xor_si128(v.d, v.a), 16);
    v.c = _mm_add_epi32(v.c, v.d);
    v.b = _mm_ror_epi32(_mm_xor_si128(v.b, v.c), 12);
    v.a = _mm_add_epi32(_mm_add_epi32(v.a, y), v.b);
    v.d = _mm_ror_epi32(_mm_xor_si128(v.d, v.a), 8);
    v.c = _mm_add_epi32(v.c, v.d);
    v.b = _mm_ror_epi32(_mm_xor_si128(v.b, v.c), 7);
}

KVTIER_SSE41 KVTIER_INLINE void to_diagonals(Rows& v) {
    v.a = _mm_shuffle_epi32(v.a, _MM_SHUFFLE(2, 1, 0, 3));
    v.d = _mm_shuffle_epi32(v.d, _MM_SHUFFLE(1, 0, 3, 2));
    v.c = _mm_shuffle_epi32(v.c, _MM_SHUFFLE(0, 3, 2, 1));
}

KVTIER_SSE41 KVTIER_INLINE void to_columns(Rows& v) {
    v.a = _mm_shuffle_epi32(v.a, _MM_SHUFFLE(0, 3, 2, 1));
    v.d = _mm_shuffle_epi32(v.d, _MM_SHUFFLE(1, 0, 3, 2));
    v.c = _mm_shuffle_epi32(v.c, _MM_SHUFFLE(2, 1, 0, 3));
}

KVTIER_SSE41 KVTIER_INLINE Rows begin(const uint32_t cv[8], uint32_t block_bytes, uint64_t counter,
                                      uint32_t flags) {
    return {row(cv), row(cv + 4), row(kIv),
            _mm_set_epi32(static_cast<int>(flags), static_cast<int>(block_bytes),
                          static_cast<int>(counter >> 32), static_cast<int>(counter))};
}

KVTIER_SSE41 KVTIER_INLINE void end(const Rows& v, uint32_t cv[8]) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(cv), _mm_xor_si128(v.a, v.c));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(cv + 4), _mm_xor_si128(v.b, v.d));
}

}  // namespace

KVTIER_SSE41 void compress_sse41(uint32_t cv[8], const uint8_t block[kBlock], uint32_t block_bytes,
                                 uint64_t counter, uint32_t flags) {
    uint32_t m[16];
    __builtin_memcpy(m, block, kBlock);
    Rows v = begin(cv, block_bytes, counter, flags);
#pragma GCC unroll 7
    for (int r = 0; r < 7; r++) {
        mix_sse(v, picked(m, kRowOrder.columns[r]), picked(m, kRowOrder.columns[r] + 4));
        to_diagonals(v);
        mix_sse(v, picked(m, kRowOrder.diagonals[r]), picked(m, kRowOrder.diagonals[r] + 4));
        to_columns(v);
    }
    end(v, cv);
}

KVTIER_AVX512 void compress_avx512(uint32_t cv[8], const uint8_t block[kBlock],
                                   uint32_t block_bytes, uint64_t counter, uint32_t flags) {
    // Loads 16 bytes at a time: the caller has just stored a chaining value here in such halves.
    const auto* in = reinterpret_cast<const __m128i*>(block);
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(in)),
                                                _mm_loadu_si128(in + 1), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(in + 2)),
                                                 _mm_loadu_si128(in + 3), 1);
    Rows v = begin(cv, block_bytes, counter, flags);
#pragma GCC unroll 7
    for (int r = 0; r < 7; r++) {
        const __m256i columns = _mm256_permutex2var_epi32(
            low, _mm256_load_si256(reinterpret_cast<const __m256i*>(kRowOrder.columns[r])), high);
        const __m256i diagonals = _mm256_permutex2var_epi32(
            low, _mm256_load_si256(reinterpret_cast<const __m256i*>(kRowOrder.diagonals[r])), high);
        mix_avx512(v, _mm256_castsi256_si128(columns), _mm256_extracti128_si256(columns, 1));
        to_diagonals(v);
        mix_avx512(v, _mm256_castsi256_si128(diagonals), _mm256_extracti128_si256(diagonals, 1));
        to_columns(v);
    }
    end(v, cv);
}

}  // namespace kvtier::blake3
#endif
