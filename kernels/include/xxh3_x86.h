// The stripes of XXH3 with AVX-512 and AVX2, for loops that have their bytes in registers. Included
// only where the processor is x86.
#pragma once

#include <immintrin.h>

#include "cpu.h"
#include "xxh3.h"

#define KVTIER_INLINE inline __attribute__((always_inline))

namespace kvtier {

struct Stripes512 {
    __m512i acc;

    KVTIER_AVX512 KVTIER_INLINE void load(const Accumulators& from) {
        acc = _mm512_load_si512(from.lane);
    }
    KVTIER_AVX512 KVTIER_INLINE void save(Accumulators& to) const {
        _mm512_store_si512(to.lane, acc);
    }
    KVTIER_AVX512 KVTIER_INLINE void add(__m512i data, const uint8_t* secret) {
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

struct Stripes256 {
    __m256i acc[2];

    KVTIER_AVX2 KVTIER_INLINE void load(const Accumulators& from) {
        for (size_t h = 0; h < 2; h++) {
            acc[h] = _mm256_load_si256(reinterpret_cast<const __m256i*>(from.lane + 4 * h));
        }
    }
    KVTIER_AVX2 KVTIER_INLINE void save(Accumulators& to) const {
        for (size_t h = 0; h < 2; h++) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(to.lane + 4 * h), acc[h]);
        }
    }
    static KVTIER_AVX2 KVTIER_INLINE __m256i at(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    // One half of a stripe; `secret` is that of the stripe.
    KVTIER_AVX2 KVTIER_INLINE void add(size_t h, __m256i data, const uint8_t* secret) {
        const __m256i keyed = _mm256_xor_si256(data, at(secret + 32 * h));
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
        acc[h] = _mm256_add_epi64(acc[h], _mm256_add_epi64(product, swapped));
    }
    KVTIER_AVX2 KVTIER_INLINE void scramble(const uint8_t* key) {
        const __m256i prime = _mm256_set1_epi64x(kPrime32First);
        for (size_t h = 0; h < 2; h++) {
            const __m256i mixed = _mm256_xor_si256(
                _mm256_xor_si256(acc[h], _mm256_srli_epi64(acc[h], 47)), at(key + 32 * h));
            // AVX2 has no 64-bit product: two 32-bit products, because the upper half of the prime
            // is zero.
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            acc[h] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
};

}  // namespace kvtier
