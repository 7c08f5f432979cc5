// The calibrated codecs: one source for both, for their element types and for all processors.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <stdexcept>
#include <vector>

#include "codec/calibrated.h"
#include "codec/calibration.h"
#include "codec/codec.h"
#include "codec/parts.h"

#if KVTIER_X86
#include <immintrin.h>
#endif

namespace kvtier::codec {
namespace {

// --- kernels -------------------------------------------------------------------------------------

enum class Turned : uint8_t { kNot, kHalves, kNeighbours };

// The heads of some tokens, and the parameters of each channel's numbers.
struct Span {
    size_t tokens, heads, dims, pairs;
    size_t token_bytes, head_bytes;   // distance to the next token, to the next head
    const float *cos, *sin;           // of the first token
    const float *expected, *factors;  // of the first head; factors are inverses or steps
};

template <Element kIs>
KVTIER_LOOP float load(const uint8_t* in, size_t i) {
    typename Value<kIs>::Bits bits;
    std::memcpy(&bits, in + i * sizeof bits, sizeof bits);
    return Value<kIs>::widened(bits);
}
template <Element kIs>
KVTIER_LOOP void store(uint8_t* out, size_t i, float value) {
    const auto bits = held_in<kIs>(value);
    std::memcpy(out + i * sizeof bits, &bits, sizeof bits);
}

// Processes one head of one token. Returns 0, or another value if a number cannot be encoded.
template <Element kIs, Turned kHow>
KVTIER_LOOP uint32_t head_numbers(const uint8_t* __restrict in, const Span& span,
                                  const float* __restrict cos, const float* __restrict sin,
                                  const float* __restrict expected,
                                  const float* __restrict inverses, int16_t* __restrict numbers) {
    uint32_t far = 0;
    size_t first = 0;
    if constexpr (kHow != Turned::kNot) {
        const size_t pairs = span.pairs;
        for (size_t j = 0; j < pairs; j++) {
            const size_t a = kHow == Turned::kHalves ? j : 2 * j;
            const size_t b = kHow == Turned::kHalves ? pairs + j : 2 * j + 1;
            const float low = load<kIs>(in, a), high = load<kIs>(in, b);
            const Pair pair = turned_back(low, high, cos[j], sin[j]);
            const float one = steps_away(pair.low, expected[a], inverses[a]);
            const float other = steps_away(pair.high, expected[b], inverses[b]);
            far |= !near_enough(one) | !near_enough(other) | !is_number<kIs>(low) |
                   !is_number<kIs>(high);
            numbers[a] = nearest_of(one), numbers[b] = nearest_of(other);
        }
        first = 2 * pairs;
    }
    for (size_t i = first; i < span.dims; i++) {
        const float value = load<kIs>(in, i);
        const float steps = steps_away(value, expected[i], inverses[i]);
        far |= !near_enough(steps) | !is_number<kIs>(value);
        numbers[i] = nearest_of(steps);
    }
    return far;
}

template <Element kIs, Turned kHow>
KVTIER_LOOP void head_values(const int16_t* __restrict numbers, const Span& span,
                             const float* __restrict cos, const float* __restrict sin,
                             const float* __restrict expected, const float* __restrict steps,
                             uint8_t* __restrict out) {
    size_t first = 0;
    if constexpr (kHow != Turned::kNot) {
        const size_t pairs = span.pairs;
        for (size_t j = 0; j < pairs; j++) {
            const size_t a = kHow == Turned::kHalves ? j : 2 * j;
            const size_t b = kHow == Turned::kHalves ? pairs + j : 2 * j + 1;
            const float low = value_at(numbers[a], steps[a], expected[a]);
            const float high = value_at(numbers[b], steps[b], expected[b]);
            const Pair pair = turned_forward(low, high, cos[j], sin[j]);
            store<kIs>(out, a, pair.low), store<kIs>(out, b, pair.high);
        }
        first = 2 * pairs;
    }
    for (size_t i = first; i < span.dims; i++) {
        store<kIs>(out, i, value_at(numbers[i], steps[i], expected[i]));
    }
}

template <Element kIs, Turned kHow>
KVTIER_LOOP bool numbers_of(const uint8_t* in, const Span& span, int16_t* numbers) {
    uint32_t far = 0;
    for (size_t token = 0; token < span.tokens; token++) {
        const size_t angles = token * span.pairs;
        for (size_t head = 0; head < span.heads; head++, numbers += span.dims) {
            const size_t channel = head * span.dims;
            far |= head_numbers<kIs, kHow>(
                in + token * span.token_bytes + head * span.head_bytes, span, span.cos + angles,
                span.sin + angles, span.expected + channel, span.factors + channel, numbers);
        }
    }
    return far == 0;
}

template <Element kIs, Turned kHow>
KVTIER_LOOP void values_of(const int16_t* numbers, const Span& span, uint8_t* out) {
    for (size_t token = 0; token < span.tokens; token++) {
        const size_t angles = token * span.pairs;
        for (size_t head = 0; head < span.heads; head++, numbers += span.dims) {
            const size_t channel = head * span.dims;
            head_values<kIs, kHow>(numbers, span, span.cos + angles, span.sin + angles,
                                   span.expected + channel, span.factors + channel,
                                   out + token * span.token_bytes + head * span.head_bytes);
        }
    }
}

constexpr size_t kSlack = 64;  // elements that kernels may access beyond the requested ones

// Converts numbers to symbols, and collects the numbers that need an escape; returns their count.
KVTIER_LOOP size_t symbols_of(const int16_t* __restrict numbers, size_t count, int reach,
                              uint8_t* __restrict symbols, int16_t* __restrict escapes) {
    constexpr size_t kAtOnce = 32;
    const auto last = static_cast<uint8_t>(2 * reach + 1);
    size_t used = 0;
    for (size_t at = 0; at < count; at += kAtOnce) {
        unsigned any = 0;
        for (size_t i = 0; i < kAtOnce; i++) {
            const auto symbol = static_cast<uint16_t>(numbers[at + i] + reach);
            symbols[at + i] = symbol < last ? static_cast<uint8_t>(symbol) : last;
            any |= symbol >= last;
        }
        if (!any) continue;
        for (size_t i = at; i < std::min(at + kAtOnce, count); i++) {
            if (symbols[i] == last) escapes[used++] = numbers[i];
        }
    }
    return used;
}

// Converts symbols to numbers; returns how many escapes were used, or kNoRoom if there are too few.
KVTIER_LOOP size_t numbers_again(const uint8_t* __restrict symbols, size_t count, int reach,
                                 const uint8_t* __restrict escapes, size_t room,
                                 int16_t* __restrict numbers) {
    constexpr size_t kAtOnce = 32;
    const auto last = static_cast<uint8_t>(2 * reach + 1);
    size_t used = 0;
    for (size_t at = 0; at < count; at += kAtOnce) {
        unsigned any = 0;
        for (size_t i = 0; i < kAtOnce; i++) {
            numbers[at + i] = static_cast<int16_t>(symbols[at + i] - reach);
            any |= symbols[at + i] == last;
        }
        if (!any) continue;
        for (size_t i = at; i < std::min(at + kAtOnce, count); i++) {
            if (symbols[i] != last) continue;
            if (used == room) return kNoRoom;
            std::memcpy(numbers + i, escapes + 2 * used++, 2);
        }
    }
    return used;
}

KVTIER_LOOP void angles_of(const uint64_t* __restrict turns, size_t pairs, uint64_t position,
                           const float* __restrict cosines, const float* __restrict sines,
                           float* __restrict cos, float* __restrict sin) {
    for (size_t j = 0; j < pairs; j++) {
        const Angle angle = angle_of(position * turns[j], cosines, sines);
        cos[j] = angle.cos, sin[j] = angle.sin;
    }
}

struct TypeKernels {
    bool (*numbers[3])(const uint8_t* in, const Span& span, int16_t* numbers);
    void (*values[3])(const int16_t* numbers, const Span& span, uint8_t* out);
};
struct LevelKernels {
    TypeKernels types[kQuantizedTypes];
    size_t (*symbols)(const int16_t* numbers, size_t count, int reach, uint8_t* symbols,
                      int16_t* escapes);
    size_t (*again)(const uint8_t* symbols, size_t count, int reach, const uint8_t* escapes,
                    size_t room, int16_t* numbers);
    void (*angles)(const uint64_t* turns, size_t pairs, uint64_t position, const float* cosines,
                   const float* sines, float* cos, float* sin);
};

// The kernels of a level, with loops compiled as by `At`.
template <template <auto> class At, Element kIs>
constexpr TypeKernels kType = {
    {At<numbers_of<kIs, Turned::kNot>>::run, At<numbers_of<kIs, Turned::kHalves>>::run,
     At<numbers_of<kIs, Turned::kNeighbours>>::run},
    {At<values_of<kIs, Turned::kNot>>::run, At<values_of<kIs, Turned::kHalves>>::run,
     At<values_of<kIs, Turned::kNeighbours>>::run}};
template <template <auto> class At>
constexpr LevelKernels kLevel = {
    {kType<At, Element::kBf16>, kType<At, Element::kFp16>, kType<At, Element::kFp32>},
    At<symbols_of>::run,
    At<numbers_again>::run,
    At<angles_of>::run};

KVTIER_COMPILED(Plain, )

#if KVTIER_X86
KVTIER_COMPILED(Half, KVTIER_AVX2)
KVTIER_COMPILED(Whole, KVTIER_VBMI)

// --- AVX-512 -------------------------------------------------------------------------------------

// Intrinsics: the compiler needs loops of 64, and half a head has 32 channels or fewer. Masked
// elements are neither read nor written.
#define WIDE KVTIER_VBMI KVTIER_LOOP

WIDE __m512i line(const void* at) { return _mm512_loadu_si512(at); }
WIDE __mmask16 first_of(size_t count) {
    return static_cast<__mmask16>(
        _bzhi_u32(0xFFFF, static_cast<unsigned>(std::min<size_t>(count, 16))));
}

template <Element kIs>
WIDE __m512 load16(const uint8_t* in, size_t i, __mmask16 these) {
    if constexpr (kIs == Element::kFp32) return _mm512_maskz_loadu_ps(these, in + 4 * i);
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(these, in + 2 * i));
    if constexpr (kIs == Element::kBf16) return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    const __m512i size = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7FFF)), 13);
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x8000)), 16);
    const __m512 grown = _mm512_mul_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(0x1p112F));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(grown), sign));
}

// The upper halves, rounded to the nearest, ties to even.
WIDE __m512i rounded_up(__m512i bits) {
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i down = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    return _mm512_srli_epi32(_mm512_mask_add_epi32(down, odd, bits, _mm512_set1_epi32(0x8000)), 16);
}

template <Element kIs>
WIDE void store16(uint8_t* out, size_t i, __mmask16 these, __m512 values) {
    if constexpr (kIs == Element::kFp32) {
        _mm512_mask_storeu_ps(out + 4 * i, these, values);
    } else {
        __m256i bits;
        if constexpr (kIs == Element::kBf16) {
            bits = _mm512_cvtepi32_epi16(rounded_up(_mm512_castps_si512(values)));
        } else {
            const __m512 most = _mm512_set1_ps(65504.0F), least = _mm512_set1_ps(-65504.0F);
            const __m512 held = _mm512_max_ps(_mm512_min_ps(values, most), least);
            bits = _mm512_cvtps_ph(held, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        }
        _mm256_mask_storeu_epi16(out + 2 * i, these, bits);
    }
}

// The largest absolute values of steps and of elements so far; NaN is larger than all numbers.
struct Seen {
    __m512i steps, elements;
};

template <Element kIs>
WIDE __m512i number16(__m512 value, __m512 expected, __m512 inverses, __m512i& most) {
    const __m512 steps = _mm512_mul_ps(_mm512_sub_ps(value, expected), inverses);
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(steps), _mm512_set1_epi32(INT32_MAX));
    most = _mm512_max_epu32(most, size);
    return _mm512_cvtps_epi32(steps);
}

template <Element kIs>
WIDE void saw(Seen& seen, __m512 value) {
    if constexpr (kIs == Element::kFp16) {
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MAX));
        seen.elements = _mm512_max_epu32(seen.elements, size);
    }
}

WIDE __m512 value16(const int16_t* numbers, const float* steps, const float* expected, size_t i,
                    __mmask16 these) {
    const __m512i wide = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(these, numbers + i));
    const __m512 away =
        _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_maskz_loadu_ps(these, steps + i));
    return _mm512_add_ps(away, _mm512_maskz_loadu_ps(these, expected + i));
}

constexpr size_t kWide = 16;

// Separates adjacent elements of two registers, and joins them again.
WIDE __m512 evens(__m512 a, __m512 b) {
    const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(a, at, b);
}
WIDE __m512 odds(__m512 a, __m512 b) {
    const __m512i at = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(a, at, b);
}
WIDE __m512 first_pairs(__m512 a, __m512 b) {
    const __m512i at = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(a, at, b);
}
WIDE __m512 last_pairs(__m512 a, __m512 b) {
    const __m512i at =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, at, b);
}

// The positions of 16 pairs: the low and the high elements, or (of neighbours) both halves of them.
template <Turned kHow>
struct Place {
    size_t a, b;
    __mmask16 in_a, in_b, angles;

    WIDE Place(size_t j, size_t pairs) : angles(first_of(pairs - j)) {
        if constexpr (kHow == Turned::kHalves) {
            a = j, b = pairs + j, in_a = in_b = angles;
        } else {
            a = 2 * j, b = 2 * j + kWide;
            in_a = first_of(2 * (pairs - j));
            in_b = 2 * (pairs - j) > kWide ? first_of(2 * (pairs - j) - kWide) : 0;
        }
    }
};

template <Element kIs, Turned kHow>
KVTIER_VBMI bool wide_numbers(const uint8_t* in, const Span& span, int16_t* numbers) {
    Seen seen = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const size_t turned = kHow == Turned::kNot ? 0 : 2 * span.pairs;
    for (size_t token = 0; token < span.tokens; token++) {
        const float *cos = span.cos + token * span.pairs, *sin = span.sin + token * span.pairs;
        for (size_t head = 0; head < span.heads; head++, numbers += span.dims) {
            const uint8_t* const from = in + token * span.token_bytes + head * span.head_bytes;
            const float* const expected = span.expected + head * span.dims;
            const float* const inverses = span.factors + head * span.dims;
            for (size_t j = 0; 2 * j < turned; j += kWide) {
                const Place<kHow> at(j, span.pairs);
                const __m512 one = load16<kIs>(from, at.a, at.in_a);
                const __m512 other = load16<kIs>(from, at.b, at.in_b);
                saw<kIs>(seen, one), saw<kIs>(seen, other);
                const bool apart = kHow == Turned::kHalves;
                const __m512 low = apart ? one : evens(one, other);
                const __m512 high = apart ? other : odds(one, other);
                const __m512 c = _mm512_maskz_loadu_ps(at.angles, cos + j);
                const __m512 s = _mm512_maskz_loadu_ps(at.angles, sin + j);
                const __m512 x = _mm512_add_ps(_mm512_mul_ps(low, c), _mm512_mul_ps(high, s));
                const __m512 y = _mm512_sub_ps(_mm512_mul_ps(high, c), _mm512_mul_ps(low, s));
                const __m512i first = number16<kIs>(
                    apart ? x : first_pairs(x, y), _mm512_maskz_loadu_ps(at.in_a, expected + at.a),
                    _mm512_maskz_loadu_ps(at.in_a, inverses + at.a), seen.steps);
                const __m512i second = number16<kIs>(
                    apart ? y : last_pairs(x, y), _mm512_maskz_loadu_ps(at.in_b, expected + at.b),
                    _mm512_maskz_loadu_ps(at.in_b, inverses + at.b), seen.steps);
                _mm256_mask_storeu_epi16(numbers + at.a, at.in_a, _mm512_cvtepi32_epi16(first));
                _mm256_mask_storeu_epi16(numbers + at.b, at.in_b, _mm512_cvtepi32_epi16(second));
            }
            for (size_t i = turned; i < span.dims; i += kWide) {
                const __mmask16 these = first_of(span.dims - i);
                const __m512 value = load16<kIs>(from, i, these);
                saw<kIs>(seen, value);
                const __m512i found =
                    number16<kIs>(value, _mm512_maskz_loadu_ps(these, expected + i),
                                  _mm512_maskz_loadu_ps(these, inverses + i), seen.steps);
                _mm256_mask_storeu_epi16(numbers + i, these, _mm512_cvtepi32_epi16(found));
            }
        }
    }
    return _mm512_reduce_max_epu32(seen.steps) < bits_of(32767.5F) &&
           _mm512_reduce_max_epu32(seen.elements) < bits_of(65536.0F);
}

template <Element kIs, Turned kHow>
KVTIER_VBMI void wide_values(const int16_t* numbers, const Span& span, uint8_t* out) {
    const size_t turned = kHow == Turned::kNot ? 0 : 2 * span.pairs;
    for (size_t token = 0; token < span.tokens; token++) {
        const float *cos = span.cos + token * span.pairs, *sin = span.sin + token * span.pairs;
        for (size_t head = 0; head < span.heads; head++, numbers += span.dims) {
            uint8_t* const to = out + token * span.token_bytes + head * span.head_bytes;
            const float* const expected = span.expected + head * span.dims;
            const float* const steps = span.factors + head * span.dims;
            for (size_t j = 0; 2 * j < turned; j += kWide) {
                const Place<kHow> at(j, span.pairs);
                const __m512 one = value16(numbers, steps, expected, at.a, at.in_a);
                const __m512 other = value16(numbers, steps, expected, at.b, at.in_b);
                const bool apart = kHow == Turned::kHalves;
                const __m512 low = apart ? one : evens(one, other);
                const __m512 high = apart ? other : odds(one, other);
                const __m512 c = _mm512_maskz_loadu_ps(at.angles, cos + j);
                const __m512 s = _mm512_maskz_loadu_ps(at.angles, sin + j);
                const __m512 x = _mm512_sub_ps(_mm512_mul_ps(low, c), _mm512_mul_ps(high, s));
                const __m512 y = _mm512_add_ps(_mm512_mul_ps(high, c), _mm512_mul_ps(low, s));
                store16<kIs>(to, at.a, at.in_a, apart ? x : first_pairs(x, y));
                store16<kIs>(to, at.b, at.in_b, apart ? y : last_pairs(x, y));
            }
            for (size_t i = turned; i < span.dims; i += kWide) {
                const __mmask16 these = first_of(span.dims - i);
                store16<kIs>(to, i, these, value16(numbers, steps, expected, i, these));
            }
        }
    }
}

KVTIER_VBMI size_t wide_symbols(const int16_t* numbers, size_t count, int reach, uint8_t* symbols,
                                int16_t* escapes) {
    const __m512i up = _mm512_set1_epi16(static_cast<short>(reach));
    const __m512i last = _mm512_set1_epi16(static_cast<short>(2 * reach + 1));
    size_t used = 0;
    for (size_t at = 0; at < count; at += 32) {
        const __m512i found = line(numbers + at);
        const __m512i symbol = _mm512_min_epu16(_mm512_add_epi16(found, up), last);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols + at), _mm512_cvtepi16_epi8(symbol));
        const auto these = _bzhi_u32(~0u, static_cast<unsigned>(std::min<size_t>(count - at, 32)));
        const __mmask32 far = _mm512_mask_cmpeq_epi16_mask(these, symbol, last);
        if (far == 0) continue;
        const auto more = static_cast<unsigned>(std::popcount(far));
        _mm512_mask_storeu_epi16(escapes + used, _bzhi_u32(~0u, more),
                                 _mm512_maskz_compress_epi16(far, found));
        used += more;
    }
    return used;
}

KVTIER_VBMI size_t wide_numbers_again(const uint8_t* symbols, size_t count, int reach,
                                      const uint8_t* escapes, size_t room, int16_t* numbers) {
    const __m512i up = _mm512_set1_epi16(static_cast<short>(reach));
    const __m256i last = _mm256_set1_epi8(static_cast<char>(2 * reach + 1));
    size_t used = 0;
    for (size_t at = 0; at < count; at += 32) {
        const __m256i symbol = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols + at));
        const auto these = _bzhi_u32(~0u, static_cast<unsigned>(std::min<size_t>(count - at, 32)));
        const __mmask32 far = _mm256_mask_cmpeq_epi8_mask(these, symbol, last);
        __m512i found = _mm512_sub_epi16(_mm512_cvtepu8_epi16(symbol), up);
        if (far != 0) {
            const auto more = static_cast<unsigned>(std::popcount(far));
            if (more > room - used) return kNoRoom;
            const __m512i here = _mm512_maskz_loadu_epi16(_bzhi_u32(~0u, more), escapes + 2 * used);
            found = _mm512_mask_expand_epi16(found, far, here);
            used += more;
        }
        _mm512_storeu_si512(numbers + at, found);
    }
    return used;
}

template <Element kIs>
constexpr TypeKernels kTypeWhole = {
    {wide_numbers<kIs, Turned::kNot>, wide_numbers<kIs, Turned::kHalves>,
     wide_numbers<kIs, Turned::kNeighbours>},
    {wide_values<kIs, Turned::kNot>, wide_values<kIs, Turned::kHalves>,
     wide_values<kIs, Turned::kNeighbours>}};
constexpr LevelKernels kWhole = {
    {kTypeWhole<Element::kBf16>, kTypeWhole<Element::kFp16>, kTypeWhole<Element::kFp32>},
    wide_symbols,
    wide_numbers_again,
    Whole<angles_of>::run};
#endif

const LevelKernels& level() { return KVTIER_LEVELS(kLevel<Plain>, kLevel<Half>, kWhole); }

// --- angles --------------------------------------------------------------------------------------

// Cosines and sines of each 1,024th of a turn, derived from the first eighth, so zeros and ones are
// exact. The doubles of every libm are accurate enough to round to the same floats.
struct Turn {
    float cosines[kTurn], sines[kTurn];

    Turn() {
        for (size_t k = 0; k < kTurn; k++) {
            cosines[k] = cosine(k);
            sines[k] = cosine((k + kTurn - kTurn / 4) % kTurn);
        }
    }

 private:
    static float cosine(size_t k) {
        if (k > kTurn / 2) k = kTurn - k;
        if (k > kTurn / 4) return -cosine(kTurn / 2 - k);
        const auto angle = [](size_t i) {
            return 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(kTurn);
        };
        if (k == kTurn / 4) return 0.0F;
        return static_cast<float>(k <= kTurn / 8 ? std::cos(angle(k))
                                                 : std::sin(angle(kTurn / 4 - k)));
    }
};

const Turn& turn() {
    static const Turn known;
    return known;
}

// Cosines and sines of tokens, which the parts of a block share: each thread keeps the last.
class Angles {
 public:
    static constexpr size_t kKept = 16'384;  // pairs, unless a token has more

    // Sets the angles of `span` for tokens from this position on; the part has `left` more.
    void take(const Rope& rope, uint64_t position, size_t left, Span& span) {
        const size_t pairs = rope.turns.size();
        const bool here =
            rope.id == rope_ && position >= first_ && position - first_ + span.tokens <= tokens_;
        if (!here) {
            tokens_ = std::min(left, std::max(span.tokens, kKept / pairs));
            rope_ = rope.id, first_ = position;
            cos_.resize(tokens_ * pairs), sin_.resize(tokens_ * pairs);
            const LevelKernels& by = level();
            for (size_t token = 0; token < tokens_; token++) {
                by.angles(rope.turns.data(), pairs, position + token, turn().cosines, turn().sines,
                          cos_.data() + token * pairs, sin_.data() + token * pairs);
            }
        }
        span.cos = cos_.data() + (position - first_) * pairs;
        span.sin = sin_.data() + (position - first_) * pairs;
        span.pairs = pairs;
    }

 private:
    uint64_t rope_ = 0, first_ = 0;
    size_t tokens_ = 0;
    std::vector<float> cos_, sin_;
};

// --- layout of a part ----------------------------------------------------------------------------

constexpr size_t kTile = 4096;  // numbers that are processed at a time
static_assert(kTile >= kHeadMost);

// The sizes of a part, if it consists of its channels.
struct Plan {
    Plan() = default;
    Plan(Codec codec, Element element, const Channels* is, size_t raw_bytes, bool heads_first) {
        type = static_cast<size_t>(element);
        if (is == nullptr || is->codec != codec || type >= kQuantizedTypes) return;
        width = element == Element::kFp32 ? 4 : 2;
        const size_t token = is->heads * is->dim * width;
        if (raw_bytes == 0 || raw_bytes % token != 0) return;
        by = is;
        tokens = raw_bytes / token;
        token_bytes = heads_first ? is->dim * width : token;
        head_bytes = heads_first ? tokens * is->dim * width : is->dim * width;
        in_a_row = is->exact == 0 && (!heads_first || is->heads == 1);
        groups = codec == Codec::kCachegen ? (tokens + is->group - 1) / is->group : 0;
        symbols = (tokens - groups) * is->count();
        streams = (symbols + kStreamSymbols - 1) / kStreamSymbols;
        exact = tokens * is->heads * is->exact * width;
        anchors = groups * is->count();
        size = kCalibratedHeader + streams * (kStreamEntry + kStatesBytes) + anchors + exact;
        if (streams > kStreamsMost) by = nullptr;
    }

    // The number of symbols in the stream that begins with this one.
    size_t of_stream(size_t first) const { return std::min(kStreamSymbols, symbols - first); }

    // Copies the exact channels of each head from the part, or into it.
    void take_exact(const uint8_t* raw, uint8_t* to) const {
        if (exact == 0) return;
        const size_t kept = by->exact * width, coded = by->coded() * width;
        for (size_t token = 0; token < tokens; token++) {
            for (size_t head = 0; head < by->heads; head++, to += kept) {
                std::memcpy(to, raw + token * token_bytes + head * head_bytes + coded, kept);
            }
        }
    }
    void give_exact(const uint8_t* from, uint8_t* raw) const {
        if (exact == 0) return;
        const size_t kept = by->exact * width, coded = by->coded() * width;
        for (size_t token = 0; token < tokens; token++) {
            for (size_t head = 0; head < by->heads; head++, from += kept) {
                std::memcpy(raw + token * token_bytes + head * head_bytes + coded, from, kept);
            }
        }
    }

    const Channels* by = nullptr;  // null if the part cannot be encoded
    size_t type = 0, width = 0, tokens = 0, token_bytes = 0, head_bytes = 0;
    bool in_a_row = false;  // true if the encoded channels are contiguous and in encoding order
    size_t groups = 0, symbols = 0, streams = 0, exact = 0, anchors = 0;
    size_t size = 0;  // of everything except words and escapes
};

// Traverses a part in its order, span by span; each run of tokens is preceded by its anchor.
class Walk {
 public:
    Walk() = default;
    explicit Walk(const Plan& plan) : plan_(plan) {}

    bool over() const { return token_ == plan_.tokens; }
    bool at_anchor() const {
        return plan_.groups != 0 && !over() && head_ == 0 && token_ % plan_.by->group == 0;
    }
    size_t group() const { return token_ / plan_.by->group; }
    size_t offset() const { return token_ * plan_.token_bytes + head_ * plan_.head_bytes; }

    // All heads of the token, with the steps of its anchor.
    Span anchor(const float* factors) const {
        const Channels& by = *plan_.by;
        return {1,       by.heads, by.coded(),      0,      plan_.token_bytes, plan_.head_bytes,
                nullptr, nullptr,  by.means.data(), factors};
    }
    void past_anchor() { token_++; }

    // As many tokens as fit into a tile, or heads of one token; numbers are relative to `expected`.
    Span span(const float* expected, const float* factors, uint64_t position,
              Angles& angles) const {
        const Channels& by = *plan_.by;
        const size_t fit = kTile / by.count(), skipped = head_ * by.coded();
        size_t left = plan_.tokens - token_;
        if (plan_.groups != 0) left = std::min(left, by.group - token_ % by.group);
        Span span = {fit != 0 ? std::min(fit, left) : 1,
                     fit != 0 ? by.heads : std::min(kTile / by.coded(), by.heads - head_),
                     by.coded(),
                     0,
                     plan_.token_bytes,
                     plan_.head_bytes,
                     nullptr,
                     nullptr,
                     expected + skipped,
                     factors + skipped};
        if (by.rope) angles.take(*by.rope, position + token_, left, span);
        return span;
    }
    void advance(const Span& span) {
        head_ += span.heads;
        if (head_ != plan_.by->heads) return;
        head_ = 0;
        token_ += span.tokens;
    }

 private:
    Plan plan_;
    size_t token_ = 0, head_ = 0;
};

size_t turned(const Channels& by) {
    if (!by.rope) return static_cast<size_t>(Turned::kNot);
    return static_cast<size_t>(by.rope->interleaved ? Turned::kNeighbours : Turned::kHalves);
}

// The expected values of a run of tokens: those of its anchor.
void make_bases(const Channels& by, const int16_t* numbers, std::vector<float>& bases) {
    bases.resize(by.count());
    for (size_t i = 0; i < bases.size(); i++) {
        bases[i] = static_cast<float>(numbers[i]) * by.anchor_steps[i];
    }
}

// --- encoding ------------------------------------------------------------------------------------

// A stream that is being encoded next to another one, and its state.
struct In {
    Encoder stream;
    Encoded* part;
    Plan plan;
    size_t first, count, filled;  // symbols
    size_t escaped;
    std::vector<uint8_t> front;  // for the first stream of a part: the bytes before it
    uint8_t symbols[kStreamSymbols + kSlack];
    int16_t escapes[kStreamSymbols + kSlack];
    uint16_t words[kWordSlack + kStreamWords];

    uint16_t* words_end() { return words + kWordSlack + kStreamWords; }
};

// The buffers of a thread: too large for a stack, and too slow to allocate each time.
struct Incoming {
    In lanes[kInTogether];
    Angles angles;
    std::vector<float> bases;
    std::vector<int16_t> anchors;
    int16_t numbers[kTile + kSlack] = {};
};

class Writer {
 public:
    Writer(Codec codec, Element is, bool streaming, uint8_t* out)
        : codec_(codec),
          is_(is),
          streaming_(streaming),
          by_(kernels()),
          level_(level()),
          out_(out),
          kept_(kept()) {}

    void add(Encoded& part, const uint8_t* ahead) {
        const Plan plan(codec_, is_, part.channels, part.raw_bytes, part.heads_first);
        ahead_ = ahead;
        if (plan.by != nullptr && plan.size < part.raw_bytes && encodes(part, plan)) return;
        while (waiting_ != 0 && kept_.lanes[waiting_ - 1].part == &part) waiting_--;
        flush();
        out_ += keep_raw(part, out_);
    }

    uint8_t* finish() {
        flush();
        return out_;
    }

 private:
    static Incoming& kept() {
        thread_local const std::unique_ptr<Incoming> kept(new Incoming);
        return *kept;
    }

    // Returns false if a number cannot be encoded.
    bool encodes(Encoded& part, const Plan& plan) {
        const Channels& by = *plan.by;
        const auto numbers = level_.types[plan.type].numbers[turned(by)];
        std::vector<uint8_t>& front = front_;
        front.clear();
        if (plan.groups != 0 && !take_anchors(part, plan, front)) return false;
        if (plan.streams == 0) {
            flush();
            begin(part, plan, front);
            end(part, plan);
            return true;
        }
        next_ = 0;
        open(part, plan);
        const float* expected = by.means.data();
        for (Walk walk(plan); !walk.over();) {
            if (walk.at_anchor()) {
                make_bases(by, kept_.anchors.data() + walk.group() * by.count(), kept_.bases);
                expected = kept_.bases.data();
                walk.past_anchor();
                continue;
            }
            const Span span = walk.span(expected, by.inverses.data(), part.position, kept_.angles);
            if (!numbers(part.raw + walk.offset(), span, kept_.numbers)) return false;
            feed(part, plan, span.tokens * span.heads * span.dims);
            walk.advance(span);
        }
        return true;
    }

    bool take_anchors(const Encoded& part, const Plan& plan, std::vector<uint8_t>& front) {
        const Channels& by = *plan.by;
        const auto numbers = level_.types[plan.type].numbers[static_cast<size_t>(Turned::kNot)];
        kept_.anchors.resize(plan.anchors);
        front.resize(plan.anchors);
        for (size_t group = 0; group < plan.groups; group++) {
            const uint8_t* const token = part.raw + group * by.group * plan.token_bytes;
            if (!numbers(token, Walk(plan).anchor(by.anchor_inverses.data()),
                         kept_.anchors.data() + group * by.count())) {
                return false;
            }
        }
        for (size_t i = 0; i < plan.anchors; i++) {
            const int16_t number = kept_.anchors[i];
            const bool far = number < -127 || number > 127;
            front[i] = static_cast<uint8_t>(far ? kAnchorEscape : number);
            if (!far) continue;
            front.push_back(static_cast<uint8_t>(number));
            front.push_back(static_cast<uint8_t>(number >> 8));
        }
        return true;
    }

    // Starts the next stream of the part in the next lane.
    void open(Encoded& part, const Plan& plan) {
        In& lane = kept_.lanes[waiting_];
        lane.part = &part;
        lane.plan = plan;
        lane.first = next_;
        lane.count = plan.of_stream(next_);
        lane.filled = lane.escaped = 0;
        if (next_ == 0) std::swap(lane.front, front_);
    }

    // Distributes numbers to streams.
    void feed(Encoded& part, const Plan& plan, size_t count) {
        for (size_t done = 0; done < count;) {
            In& lane = kept_.lanes[waiting_];
            const size_t now = std::min(count - done, lane.count - lane.filled);
            lane.escaped += level_.symbols(kept_.numbers + done, now, plan.by->reach,
                                           lane.symbols + lane.filled, lane.escapes + lane.escaped);
            lane.filled += now, done += now, next_ += now;
            if (lane.filled != lane.count) continue;
            const size_t up = (lane.count + kLanes - 1) / kLanes * kLanes;
            std::memset(lane.symbols + lane.count, plan.by->reach, up - lane.count);
            if (++waiting_ == kInTogether) flush();
            if (next_ != plan.symbols) open(part, plan);
        }
    }

    void flush() {
        Encoder* streams[kInTogether];
        size_t rows[kInTogether] = {};
        for (size_t i = 0; i < waiting_; i++) {
            In& lane = kept_.lanes[i];
            rows[i] = (lane.count + kLanes - 1) / kLanes;
            std::fill_n(lane.stream.state, kLanes, kStateLeast);
            lane.stream.codes = lane.symbols + rows[i] * kLanes;
            lane.stream.words = lane.words_end();
            lane.stream.table = &lane.plan.by->table;
            const size_t after = lane.first + kInTogether * kStreamSymbols;
            const bool more = lane.plan.in_a_row && after < lane.plan.symbols;
            lane.stream.next = more ? lane.part->raw + after * lane.plan.width : ahead_;
            lane.stream.next_step = kLanes * lane.plan.width;
            streams[i] = &lane.stream;
        }
        advance(by_.encode, streams, rows, waiting_);
        for (size_t i = 0; i < waiting_; i++) place(kept_.lanes[i]);
        waiting_ = 0;
    }

    void place(In& lane) {
        Encoded& part = *lane.part;
        const size_t words = static_cast<size_t>(lane.words_end() - lane.stream.words);
        if (lane.first == 0) begin(part, lane.plan, lane.front);
        size_ += 2 * (words + lane.escaped);
        if (size_ < part.raw_bytes) {
            uint8_t* const entry =
                out_ + kCalibratedHeader + lane.first / kStreamSymbols * kStreamEntry;
            put32(entry, words);
            put32(entry + 4, lane.escaped);
            std::memcpy(at_, lane.stream.state, kStatesBytes);
            put_bytes(at_ + kStatesBytes, lane.stream.words, 2 * words, streaming_);
            at_ += kStatesBytes + 2 * words;
            std::memcpy(at_, lane.escapes, 2 * lane.escaped);
            at_ += 2 * lane.escaped;
        }
        if (lane.first + lane.count == lane.plan.symbols) end(part, lane.plan);
    }

    void begin(const Encoded& part, const Plan& plan, const std::vector<uint8_t>& front) {
        const size_t escaped = front.size() - plan.anchors;
        size_ = plan.size + escaped;
        if (size_ >= part.raw_bytes) return;
        out_[kElementAt] = static_cast<uint8_t>(is_);
        out_[kLevelAt] = plan.by->level;
        out_[kStreamsAt] = static_cast<uint8_t>(plan.streams);
        out_[kStreamsAt + 1] = static_cast<uint8_t>(plan.streams >> 8);
        put32(out_ + kLastAt, codec_ == Codec::kEcsq ? part.position : escaped / 2);
        at_ = out_ + kCalibratedHeader + plan.streams * kStreamEntry;
        if (!front.empty()) std::memcpy(at_, front.data(), front.size());
        at_ += front.size();
    }

    void end(Encoded& part, const Plan& plan) {
        if (size_ >= part.raw_bytes) {
            out_ += keep_raw(part, out_);
            return;
        }
        plan.take_exact(part.raw, at_);
        part.codec = codec_;
        part.bytes = size_;
        out_ += size_;
    }

    Codec codec_;
    Element is_;
    bool streaming_;
    const Kernels& by_;
    const LevelKernels& level_;
    uint8_t* out_;  // the start of the part whose streams are being placed
    Incoming& kept_;
    std::vector<uint8_t> front_;
    const uint8_t* ahead_ = nullptr;
    size_t waiting_ = 0;
    size_t next_ = 0;  // the next symbol to encode
    size_t size_ = 0;  // of that part, as far as it is known
    uint8_t* at_ = nullptr;
};

}  // namespace

uint8_t* encode_calibrated(Codec codec, Element is, std::span<Encoded> parts, bool streaming,
                           uint8_t* out) {
    Writer writer(codec, is, streaming, out);
    for (size_t i = 0; i < parts.size(); i++) writer.add(parts[i], ahead(parts, i, kInTogether));
    return writer.finish();
}

// --- decoding ------------------------------------------------------------------------------------

namespace {

// A stream that is being decoded, and its state.
struct Out {
    Decoder stream;
    DecodeTable table;
    Plan plan;
    const Decoded* part;
    size_t number;        // of the part, in its list
    size_t first, count;  // symbols
    size_t words;         // in bytes
    const uint8_t *escapes, *anchors, *exact;
    size_t escaped, far_anchors;
    uint8_t symbols[kStreamSymbols + kSlack];
    // A copy, so that a damaged stream reads no memory outside.
    uint8_t text[2 * (kStreamWords + kWordSlack)];

    size_t rows() const { return (count + kLanes - 1) / kLanes; }
};

// A part that is being decoded; its numbers arrive in order.
class Target {
 public:
    // Returns false if its anchors are damaged.
    bool begin(const Out& lane, bool streaming) {
        plan_ = lane.plan;
        walk_ = Walk(plan_);
        raw_ = lane.part->raw;
        streaming_ = streaming && plan_.in_a_row;
        held_ = 0;
        const Channels& by = *plan_.by;
        values_ = level().types[plan_.type].values;
        expected_ = by.means.data();
        position_ = get32(lane.part->from + kLastAt);
        if (plan_.groups != 0 && !take_anchors(lane)) return false;
        next();
        return true;
    }

    // Writes the numbers of the next stream; returns how many escapes were used, or kNoRoom.
    size_t put(const Out& lane) {
        const LevelKernels& by = level();
        size_t used = 0;
        for (size_t done = 0; done < lane.count;) {
            const size_t now = std::min(lane.count - done, wanted_ - held_);
            const size_t more =
                by.again(lane.symbols + done, now, plan_.by->reach, lane.escapes + 2 * used,
                         lane.escaped - used, numbers_ + held_);
            if (more == kNoRoom) return more;
            used += more, held_ += now, done += now;
            if (held_ != wanted_) continue;
            give(values_[turned(*plan_.by)], span_, numbers_);
            walk_.advance(span_);
            next();
        }
        return used;
    }

 private:
    // Writes the anchors, and prepares for the numbers of the next span.
    void next() {
        held_ = wanted_ = 0;
        const Channels& by = *plan_.by;
        while (walk_.at_anchor()) {
            const int16_t* const numbers = anchors_.data() + walk_.group() * by.count();
            const Span span = walk_.anchor(by.anchor_steps.data());
            values_[static_cast<size_t>(Turned::kNot)](numbers, span, raw_ + walk_.offset());
            make_bases(by, numbers, bases_);
            expected_ = bases_.data();
            walk_.past_anchor();
        }
        if (walk_.over()) return;
        span_ = walk_.span(expected_, by.steps.data(), position_, angles_);
        wanted_ = span_.tokens * span_.heads * span_.dims;
    }

    void give(void (*values)(const int16_t*, const Span&, uint8_t*), const Span& span,
              const int16_t* numbers) {
        uint8_t* const out = raw_ + walk_.offset();
        if (!streaming_) return values(numbers, span, out);
        const size_t nbytes = wanted_ * plan_.width;
        prefetch_pages(out + kPagesAhead, nbytes);
        values(numbers, span, scratch_);
        put_bytes(out, scratch_, nbytes, true);
    }

    bool take_anchors(const Out& lane) {
        anchors_.resize(plan_.anchors);
        size_t used = 0;
        for (size_t i = 0; i < plan_.anchors; i++) {
            const auto number = static_cast<int8_t>(lane.anchors[i]);
            anchors_[i] = number;
            if (number != kAnchorEscape) continue;
            if (used == lane.far_anchors) return false;
            std::memcpy(&anchors_[i], lane.anchors + plan_.anchors + 2 * used++, 2);
        }
        return used == lane.far_anchors;
    }

    Plan plan_;
    Walk walk_;
    uint8_t* raw_ = nullptr;
    bool streaming_ = false;
    void (*const* values_)(const int16_t*, const Span&, uint8_t*) = nullptr;
    const float* expected_ = nullptr;
    uint64_t position_ = 0;
    Span span_{};
    size_t held_ = 0, wanted_ = 0;
    Angles angles_;
    std::vector<float> bases_;
    std::vector<int16_t> anchors_;
    int16_t numbers_[kTile + kSlack] = {};
    alignas(64) uint8_t scratch_[4 * kTile];
};

}  // namespace

struct CalibratedReader::Kept {
    codec::Out lanes[kSideBySide];
    Target target;

    static bool begin(codec::Out& lane, const uint8_t* at, size_t words, size_t escaped) {
        std::memcpy(lane.stream.state, at, kStatesBytes);
        if (!begins(lane.stream) || words > words_most(lane.rows() * kLanes)) return false;
        std::memcpy(lane.text, at + kStatesBytes, 2 * words);
        lane.words = 2 * words;
        lane.stream.table = &lane.table;
        lane.stream.codes = lane.symbols;
        lane.stream.words = lane.text;
        lane.stream.next = lane.symbols;
        lane.stream.next_step = 0;
        lane.escapes = at + kStatesBytes + 2 * words;
        lane.escaped = escaped;
        return true;
    }

    // Writes the numbers of a stream to their place. A valid stream ends with its last word, in the
    // encoder's initial state, and is filled up with zeros.
    bool take(const codec::Out& lane, bool streaming) {
        const uint8_t* const end = lane.symbols + lane.rows() * kLanes;
        const bool whole = lane.stream.words == lane.text + lane.words && ends(lane.stream) &&
                           std::all_of(lane.symbols + lane.count, end, [&](uint8_t symbol) {
                               return symbol == lane.plan.by->reach;
                           });
        if (!whole || (lane.first == 0 && !target.begin(lane, streaming))) return false;
        if (target.put(lane) != lane.escaped) return false;
        if (lane.first + lane.count == lane.plan.symbols) {
            lane.plan.give_exact(lane.exact, lane.part->raw);
        }
        return true;
    }
};

bool CalibratedReader::fail(size_t number) {
    failed_ = number;
    waiting_ = 0;
    return false;
}

bool CalibratedReader::add(const Decoded& part, size_t number) {
    thread_local const std::unique_ptr<Kept> kept(new Kept());
    kept_ = kept.get();
    const Plan plan(part.codec, is_, part.channels, part.raw_bytes, part.heads_first);
    const uint8_t* const from = part.from;
    if (plan.by == nullptr || part.bytes < plan.size ||
        from[kElementAt] != static_cast<uint8_t>(is_) || from[kLevelAt] != plan.by->level ||
        (from[kStreamsAt] | static_cast<size_t>(from[kStreamsAt + 1]) << 8) != plan.streams) {
        return fail(number);
    }
    size_t left = part.bytes - plan.size;  // of words and escapes
    const size_t far_anchors = plan.groups != 0 ? get32(from + kLastAt) : 0;
    if (far_anchors > left / 2) return fail(number);
    left -= 2 * far_anchors;
    const uint8_t* const anchors = from + kCalibratedHeader + plan.streams * kStreamEntry;
    const uint8_t* at = anchors + plan.anchors + 2 * far_anchors;
    for (size_t i = 0; i < plan.streams; i++) {
        const uint8_t* const entry = from + kCalibratedHeader + i * kStreamEntry;
        const size_t words = get32(entry), escaped = get32(entry + 4);
        if (words > left / 2 || escaped > left / 2 - words) return fail(number);
        left -= 2 * (words + escaped);
        Out& lane = kept_->lanes[waiting_++];
        lane.plan = plan;
        lane.part = &part;
        lane.number = number;
        lane.first = i * kStreamSymbols;
        lane.count = plan.of_stream(lane.first);
        lane.anchors = anchors;
        lane.far_anchors = far_anchors;
        lane.exact = from + part.bytes - plan.exact;
        kernels().table(plan.by->frequencies, lane.table);
        if (!Kept::begin(lane, at, words, escaped)) return fail(number);
        at += kStatesBytes + 2 * (words + escaped);
        if (waiting_ == kSideBySide && !flush()) return false;
    }
    if (left != 0) return fail(number);
    if (plan.streams != 0) return true;
    if (!flush()) return false;
    Out& lane = kept_->lanes[0];
    lane.plan = plan;
    lane.part = &part;
    lane.anchors = anchors;
    lane.far_anchors = far_anchors;
    if (!kept_->target.begin(lane, streaming_)) return fail(number);
    plan.give_exact(at, part.raw);
    return true;
}

bool CalibratedReader::flush() {
    Decoder* streams[kSideBySide];
    size_t rows[kSideBySide] = {};
    for (size_t i = 0; i < waiting_; i++) {
        Out& lane = kept_->lanes[i];
        streams[i] = &lane.stream;
        rows[i] = lane.rows();
    }
    advance(kernels().decode, streams, rows, waiting_);
    for (size_t i = 0; i < waiting_; i++) {
        if (!kept_->take(kept_->lanes[i], streaming_)) return fail(kept_->lanes[i].number);
    }
    waiting_ = 0;
    return true;
}

// --- parameters of a profile ---------------------------------------------------------------------

Rope::Rope(std::vector<uint64_t> pairs, bool neighbours)
    : turns(std::move(pairs)), interleaved(neighbours) {
    static std::atomic<uint64_t> last{0};
    if (turns.empty() || turns.size() > kHeadMost / 2)
        throw std::invalid_argument("rope: invalid number of turns");
    id = ++last;
}

Channels::Channels(Codec by, unsigned at_level, size_t group_tokens, const Parameters& given)
    : codec(by),
      level(static_cast<uint8_t>(at_level)),
      group(group_tokens),
      heads(given.heads),
      dim(given.dim),
      exact(given.exact),
      rope(given.rope),
      symbols(given.symbols),
      reach(static_cast<int>(given.symbols / 2) - 1) {
    const auto hold = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(what);
    };
    hold(calibrated(codec), "codec: must be 7 or 8");
    hold(at_level <= 255, "level: at most 255");
    hold(group >= 1 && group <= kGroupMost, "group: 1 to 256 tokens");
    hold(heads >= 1 && heads <= kHeadsMost, "part: 1 to 1,024 heads");
    hold(dim >= 1 && dim <= kHeadMost && exact < dim, "part: a head must have 1 to 4,096 channels");
    hold(!rope || 2 * rope->turns.size() <= coded(), "part: rotates more channels than it encodes");
    hold(given.exponents_count == count(), "part: the number of steps differs from the channels");
    hold(symbols >= 4 && symbols <= kSymbolsMost && symbols % 2 == 0, "table: symbols");
    uint32_t sum = 0;
    for (size_t i = 0; i < symbols; i++) {
        hold(given.table[i] != 0, "table: a frequency is 0");
        frequencies[i] = given.table[i];
        sum += given.table[i];
    }
    hold(sum == kScale, "table: the sum of the frequencies is not 256");
    make_table(frequencies, symbols, table);
    for (size_t i = 0; i < count(); i++) {
        steps.push_back(step_at(given.exponents[i]));
        inverses.push_back(inverse_at(given.exponents[i]));
    }
    if (codec == Codec::kCachegen) {
        rope.reset();
        means.assign(count(), 0.0F);
        hold(given.anchors_count == count(),
             "part: the number of anchors differs from the channels");
        for (size_t i = 0; i < count(); i++) {
            anchor_steps.push_back(step_at(given.anchors[i]));
            anchor_inverses.push_back(inverse_at(given.anchors[i]));
        }
    } else {
        hold(given.means_count == count(), "part: the number of means differs from the channels");
        means.assign(given.means, given.means + count());
        hold(std::all_of(means.begin(), means.end(),
                         [](float mean) { return mean >= -0x1p32F && mean <= 0x1p32F; }),
             "part: a mean exceeds 2^32");
    }
}

}  // namespace kvtier::codec
