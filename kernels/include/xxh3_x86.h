// The stripes of XXH3 with AVX-512, for loops that have their bytes in registers. Included only
// where the processor is x86.
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

}  // namespace kvtier
