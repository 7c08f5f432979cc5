// Codecs with a fixed rate: one source for all of their widths, element types and processors.
#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/codec.h"
#include "codec/parts.h"

#if KVTIER_X86
#include <immintrin.h>
#endif
#include "codec/quantized.h"

namespace kvtier::codec {
namespace {

// --- kernels -------------------------------------------------------------------------------------

// Plain loops, vectorized for each level. No result depends on the order of operations.

template <Element kIs>
KVTIER_LOOP typename Value<kIs>::Order ordered(const uint8_t* in) {
    typename Value<kIs>::Order bits;
    std::memcpy(&bits, in, sizeof bits);
    return turned(bits);
}
template <Element kIs>
KVTIER_LOOP float unordered(typename Value<kIs>::Order order) {
    return Value<kIs>::widened(static_cast<typename Value<kIs>::Bits>(turned(order)));
}
template <Element kIs>
KVTIER_LOOP float loaded(const uint8_t* in) {
    typename Value<kIs>::Bits bits;
    std::memcpy(&bits, in, sizeof bits);
    return Value<kIs>::widened(bits);
}

// What a code is: an integer above a base, or a float of 8 or 4 bits.
enum class Code { kInteger, kE4m3, kE2m1 };

template <Code kCode>
KVTIER_LOOP uint8_t coded(float value, float base, float inverse) {
    if constexpr (kCode == Code::kE4m3) return e4m3_of(value * inverse);
    if constexpr (kCode == Code::kE2m1) return e2m1_of(value, inverse);
    return code_of(value, base, inverse);
}
template <Code kCode>
KVTIER_LOOP float valued(uint8_t code, float base, float step) {
    if constexpr (kCode == Code::kE4m3) return float_of_e4m3(code) * step;
    if constexpr (kCode == Code::kE2m1) return float_of_e2m1(code) * step;
    return value_of(code, base, step);
}

// Calls `act` for each i < count. A constant count needs no loop for remaining elements.
template <size_t kMost, typename Act>
KVTIER_LOOP void of_count(size_t count, Act act) {
    if (count == kMost) {
        for (size_t i = 0; i < kMost; i++) act(i);
    } else {
        for (size_t i = 0; i < count; i++) act(i);
    }
}

// The minimum and maximum of each channel.
template <Element kIs>
KVTIER_LOOP void channel_ranges(const uint8_t* __restrict in, size_t rows, size_t channels,
                                size_t /* head */, float* __restrict least,
                                float* __restrict most) {
    using Order = typename Value<kIs>::Order;
    constexpr size_t kWide = 64;
    for (size_t first = 0; first < channels; first += kWide) {
        const size_t count = std::min(kWide, channels - first);
        Order low[kWide], high[kWide];
        const uint8_t* row = in + first * kBytes<kIs>;
        for (size_t i = 0; i < count; i++) low[i] = high[i] = ordered<kIs>(row + i * sizeof(Order));
        for (size_t i = count; i < kWide; i++) low[i] = high[i] = 0;
        for (size_t r = 1; r < rows; r++) {
            row += channels * kBytes<kIs>;
            of_count<kWide>(count, [&](size_t i) __attribute__((always_inline)) {
                const Order one = ordered<kIs>(row + i * sizeof(Order));
                low[i] = one < low[i] ? one : low[i];
                high[i] = one > high[i] ? one : high[i];
            });
        }
        for (size_t i = 0; i < count; i++) {
            least[first + i] = unordered<kIs>(low[i]);
            most[first + i] = unordered<kIs>(high[i]);
        }
    }
}

// Calls `act` for each group of at most kMost channels: its first element, and how many it has.
template <size_t kMost, typename Act>
KVTIER_LOOP void of_groups(size_t elements, size_t head, Act act) {
    const size_t group = group_of(head, kMost);
    for (size_t at = 0; at < elements;) {
        for (size_t left = head; left != 0;) {
            const size_t count = std::min(group, left);
            // With a constant count, the compiler needs no loop for remaining elements.
            if (count == kMost) {
                act(at, kMost);
            } else {
                act(at, count);
            }
            left -= count, at += count;
        }
    }
}

// The minimum and maximum of each group of a token's channels.
template <Element kIs>
KVTIER_LOOP void group_range(const uint8_t* __restrict in, size_t count, float& least,
                             float& most) {
    using Order = typename Value<kIs>::Order;
    Order low = ordered<kIs>(in), high = low;
    for (size_t i = 0; i < count; i++) {
        const Order one = ordered<kIs>(in + i * sizeof(Order));
        low = one < low ? one : low;
        high = one > high ? one : high;
    }
    least = unordered<kIs>(low), most = unordered<kIs>(high);
}
template <Element kIs>
KVTIER_LOOP void group_ranges(const uint8_t* __restrict in, size_t rows, size_t channels,
                              size_t head, float* __restrict least, float* __restrict most) {
    const auto act = [&](size_t at, size_t count) __attribute__((always_inline)) {
        group_range<kIs>(in + at * kBytes<kIs>, count, *least++, *most++);
    };
    of_groups<64>(rows * channels, head, act);
}

// The bits of a magnitude: integers of the same order.
template <Element kIs>
KVTIER_LOOP typename Value<kIs>::Bits magnitude(const uint8_t* in) {
    typename Value<kIs>::Bits bits;
    std::memcpy(&bits, in, sizeof bits);
    constexpr auto kSize =
        static_cast<typename Value<kIs>::Bits>(~(uint64_t{1} << (8 * sizeof bits - 1)));
    return static_cast<typename Value<kIs>::Bits>(bits & kSize);
}

// The largest magnitude of all elements, of each channel, and of each group of a token's channels.
template <Element kIs>
KVTIER_LOOP float largest_of(const uint8_t* __restrict in, size_t count) {
    typename Value<kIs>::Bits most = 0;
    for (size_t i = 0; i < count; i++) {
        const auto one = magnitude<kIs>(in + i * kBytes<kIs>);
        most = one > most ? one : most;
    }
    return Value<kIs>::widened(most);
}
template <Element kIs>
KVTIER_LOOP void channel_sizes(const uint8_t* __restrict in, size_t rows, size_t channels,
                               size_t /* head */, float* __restrict sizes) {
    using Bits = typename Value<kIs>::Bits;
    constexpr size_t kWide = 64;
    for (size_t first = 0; first < channels; first += kWide) {
        const size_t count = std::min(kWide, channels - first);
        const uint8_t* row = in + first * kBytes<kIs>;
        Bits most[kWide] = {};
        for (size_t r = 0; r < rows; r++, row += channels * kBytes<kIs>) {
            of_count<kWide>(count, [&](size_t i) __attribute__((always_inline)) {
                const Bits one = magnitude<kIs>(row + i * kBytes<kIs>);
                most[i] = one > most[i] ? one : most[i];
            });
        }
        for (size_t i = 0; i < count; i++) sizes[first + i] = Value<kIs>::widened(most[i]);
    }
}
template <Element kIs, size_t kMost>
KVTIER_LOOP void group_sizes(const uint8_t* __restrict in, size_t rows, size_t channels,
                             size_t head, float* __restrict sizes) {
    const auto act = [&](size_t at, size_t count) __attribute__((always_inline)) {
        *sizes++ = largest_of<kIs>(in + at * kBytes<kIs>, count);
    };
    of_groups<kMost>(rows * channels, head, act);
}

// The bytes of the steps of nvfp4 (a part has a scale) and of mxfp4, the steps, and their inverses
// in place of the sizes.
KVTIER_LOOP void small_steps(unsigned said, float scale, size_t count, float* __restrict sizes,
                             uint8_t* __restrict bytes) {
    if (said == kNvfp4Bits) {
        const float inverse = part_inverse_of(scale);
        for (size_t i = 0; i < count; i++) {
            bytes[i] = nvfp4_byte(sizes[i], inverse);
            const float step = nvfp4_step(bytes[i], scale);
            sizes[i] = inverse_of(step);
        }
        return;
    }
    for (size_t i = 0; i < count; i++) {
        bytes[i] = mxfp4_byte(sizes[i]);
        sizes[i] = inverse_of(mxfp4_step(bytes[i]));
    }
}
KVTIER_LOOP void steps_again(unsigned said, float scale, size_t count,
                             const uint8_t* __restrict bytes, float* __restrict steps) {
    if (said == kNvfp4Bits) {
        for (size_t i = 0; i < count; i++) steps[i] = nvfp4_step(bytes[i], scale);
        return;
    }
    for (size_t i = 0; i < count; i++) steps[i] = mxfp4_step(bytes[i]);
}

template <Element kIs, Code kCode>
KVTIER_LOOP void channel_codes(const uint8_t* __restrict in, size_t rows, size_t channels,
                               size_t /* head */, const float* __restrict base,
                               const float* __restrict inverse, uint8_t* __restrict codes) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < channels; i++) {
            codes[i] = coded<kCode>(loaded<kIs>(in + i * kBytes<kIs>), base[i], inverse[i]);
        }
        in += channels * kBytes<kIs>, codes += channels;
    }
}

template <Element kIs, Code kCode>
KVTIER_LOOP void group_codes(const uint8_t* __restrict in, size_t count, float base, float inverse,
                             uint8_t* __restrict codes) {
    for (size_t i = 0; i < count; i++) {
        codes[i] = coded<kCode>(loaded<kIs>(in + i * kBytes<kIs>), base, inverse);
    }
}
template <Element kIs, Code kCode, size_t kMost>
KVTIER_LOOP void token_codes(const uint8_t* __restrict in, size_t rows, size_t channels,
                             size_t head, const float* __restrict base,
                             const float* __restrict inverse, uint8_t* __restrict codes) {
    const auto act = [&](size_t at, size_t count) __attribute__((always_inline)) {
        group_codes<kIs, kCode>(in + at * kBytes<kIs>, count, *base++, *inverse++, codes + at);
    };
    of_groups<kMost>(rows * channels, head, act);
}

template <Element kIs, Code kCode>
KVTIER_LOOP void channel_values(const uint8_t* __restrict codes, size_t rows, size_t channels,
                                size_t /* head */, const float* __restrict base,
                                const float* __restrict step, uint8_t* __restrict out) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < channels; i++) {
            const auto bits = Value<kIs>::narrowed(valued<kCode>(codes[i], base[i], step[i]));
            std::memcpy(out + i * kBytes<kIs>, &bits, sizeof bits);
        }
        codes += channels, out += channels * kBytes<kIs>;
    }
}

template <Element kIs, Code kCode>
KVTIER_LOOP void group_values(const uint8_t* __restrict codes, size_t count, float base, float step,
                              uint8_t* __restrict out) {
    for (size_t i = 0; i < count; i++) {
        const auto bits = Value<kIs>::narrowed(valued<kCode>(codes[i], base, step));
        std::memcpy(out + i * kBytes<kIs>, &bits, sizeof bits);
    }
}
template <Element kIs, Code kCode, size_t kMost>
KVTIER_LOOP void token_values(const uint8_t* __restrict codes, size_t rows, size_t channels,
                              size_t head, const float* __restrict base,
                              const float* __restrict step, uint8_t* __restrict out) {
    const auto act = [&](size_t at, size_t count) __attribute__((always_inline)) {
        group_values<kIs, kCode>(codes + at, count, *base++, *step++, out + at * kBytes<kIs>);
    };
    of_groups<kMost>(rows * channels, head, act);
}

// e5m2 of an element, and back; in integers where that is faster.
template <Element kIs>
KVTIER_LOOP uint8_t halved(typename Value<kIs>::Bits bits) {
    if constexpr (kIs != Element::kFp16) return e5m2_of(Value<kIs>::widened(bits));
    const uint32_t size = bits & 0x7FFF;
    return static_cast<uint8_t>((size + 0x7F + (size >> 8 & 1)) >> 8 | (bits >> 8 & 0x80));
}
template <Element kIs>
KVTIER_LOOP typename Value<kIs>::Bits unhalved(uint8_t code) {
    if constexpr (kIs == Element::kFp32) return Value<kIs>::narrowed(float_of_e5m2(code));
    if constexpr (kIs == Element::kFp16) return static_cast<uint16_t>(code << 8);
    const uint16_t size = code & 0x7F;
    const auto normal = static_cast<uint16_t>((size << 5) + (112 << 7));
    const auto below = static_cast<uint16_t>(size == 0   ? 0
                                             : size == 1 ? 0x3780
                                             : size == 2 ? 0x3800
                                                         : 0x3840);
    return static_cast<uint16_t>((size < 4 ? below : normal) | (code & 0x80) << 8);
}

// Returns the largest magnitude.
template <Element kIs>
KVTIER_LOOP float halves(const uint8_t* __restrict in, size_t count, uint8_t* __restrict codes) {
    typename Value<kIs>::Bits most = 0;
    for (size_t i = 0; i < count; i++) {
        typename Value<kIs>::Bits bits;
        std::memcpy(&bits, in + i * kBytes<kIs>, sizeof bits);
        const auto size = magnitude<kIs>(in + i * kBytes<kIs>);
        most = size > most ? size : most;
        codes[i] = halved<kIs>(bits);
    }
    return Value<kIs>::widened(most);
}
template <Element kIs>
KVTIER_LOOP void wholes(const uint8_t* __restrict codes, size_t count, uint8_t* __restrict out) {
    for (size_t i = 0; i < count; i++) {
        const auto bits = unhalved<kIs>(codes[i]);
        std::memcpy(out + i * kBytes<kIs>, &bits, sizeof bits);
    }
}

// Codes with less than 8 bits: of the 64 codes of a unit, code i goes into byte i modulo the unit's
// bytes; those with the lowest i go into the lowest bits.
template <unsigned kBits>
KVTIER_LOOP void pack(const uint8_t* __restrict codes, size_t units, uint8_t* __restrict out) {
    constexpr size_t kPacked = kUnit * kBits / 8;
    for (size_t unit = 0; unit < units; unit++, codes += kUnit, out += kPacked) {
        for (size_t i = 0; i < kPacked; i++) {
            unsigned byte = 0;
            for (size_t k = 0; k < 8 / kBits; k++) {
                byte |= static_cast<unsigned>(codes[i + k * kPacked]) << (k * kBits);
            }
            out[i] = static_cast<uint8_t>(byte);
        }
    }
}

template <unsigned kBits>
KVTIER_LOOP void unpack(const uint8_t* __restrict in, size_t units, uint8_t* __restrict codes) {
    constexpr size_t kPacked = kUnit * kBits / 8;
    for (size_t unit = 0; unit < units; unit++, codes += kUnit, in += kPacked) {
        for (size_t k = 0; k < 8 / kBits; k++) {
            for (size_t i = 0; i < kPacked; i++) {
                codes[i + k * kPacked] =
                    static_cast<uint8_t>(in[i] >> (k * kBits) & ((1u << kBits) - 1));
            }
        }
    }
}

// Kernels for rows of whole tokens. There is one step per channel, or (by token) one for each group
// of each row; the kernels of codes and values are in the order of `kind`.
struct TypeKernels {
    void (*ranges[2])(const uint8_t* in, size_t rows, size_t channels, size_t head, float* least,
                      float* most);
    void (*sizes[3])(const uint8_t* in, size_t rows, size_t channels, size_t head, float* sizes);
    void (*codes[8])(const uint8_t* in, size_t rows, size_t channels, size_t head,
                     const float* base, const float* inverse, uint8_t* codes);
    void (*values[8])(const uint8_t* codes, size_t rows, size_t channels, size_t head,
                      const float* base, const float* step, uint8_t* out);
    float (*largest)(const uint8_t* in, size_t count);
    float (*halves)(const uint8_t* in, size_t count, uint8_t* codes);
    void (*wholes)(const uint8_t* codes, size_t count, uint8_t* out);
};
struct LevelKernels {
    TypeKernels types[kQuantizedTypes];
    void (*pack4)(const uint8_t* codes, size_t units, uint8_t* out);
    void (*pack2)(const uint8_t* codes, size_t units, uint8_t* out);
    void (*unpack4)(const uint8_t* in, size_t units, uint8_t* codes);
    void (*unpack2)(const uint8_t* in, size_t units, uint8_t* codes);
    void (*small_steps)(unsigned said, float scale, size_t count, float* sizes, uint8_t* bytes);
    void (*steps_again)(unsigned said, float scale, size_t count, const uint8_t* bytes,
                        float* steps);
};

// The kernels of a level, with loops compiled as by `At`.
template <template <auto> class At, Element kIs, Code kCode, size_t kMost>
constexpr auto kCodes = At<token_codes<kIs, kCode, kMost>>::run;
template <template <auto> class At, Element kIs, Code kCode>
constexpr auto kCodes<At, kIs, kCode, 0> = At<channel_codes<kIs, kCode>>::run;
template <template <auto> class At, Element kIs, Code kCode, size_t kMost>
constexpr auto kValues = At<token_values<kIs, kCode, kMost>>::run;
template <template <auto> class At, Element kIs, Code kCode>
constexpr auto kValues<At, kIs, kCode, 0> = At<channel_values<kIs, kCode>>::run;

template <template <auto> class At, Element kIs>
constexpr TypeKernels kType = {
    {At<channel_ranges<kIs>>::run, At<group_ranges<kIs>>::run},
    {At<channel_sizes<kIs>>::run, At<group_sizes<kIs, 16>>::run, At<group_sizes<kIs, 32>>::run},
    {kCodes<At, kIs, Code::kInteger, 0>, kCodes<At, kIs, Code::kInteger, 64>,
     kCodes<At, kIs, Code::kE4m3, 0>, kCodes<At, kIs, Code::kE4m3, 64>,
     kCodes<At, kIs, Code::kE2m1, 0>, kCodes<At, kIs, Code::kE2m1, 16>,
     kCodes<At, kIs, Code::kE2m1, 0>, kCodes<At, kIs, Code::kE2m1, 32>},
    {kValues<At, kIs, Code::kInteger, 0>, kValues<At, kIs, Code::kInteger, 64>,
     kValues<At, kIs, Code::kE4m3, 0>, kValues<At, kIs, Code::kE4m3, 64>,
     kValues<At, kIs, Code::kE2m1, 0>, kValues<At, kIs, Code::kE2m1, 16>,
     kValues<At, kIs, Code::kE2m1, 0>, kValues<At, kIs, Code::kE2m1, 32>},
    At<largest_of<kIs>>::run,
    At<halves<kIs>>::run,
    At<wholes<kIs>>::run};
template <template <auto> class At>
constexpr LevelKernels kLevel = {
    {kType<At, Element::kBf16>, kType<At, Element::kFp16>, kType<At, Element::kFp32>},
    At<pack<4>>::run,
    At<pack<2>>::run,
    At<unpack<4>>::run,
    At<unpack<2>>::run,
    At<small_steps>::run,
    At<steps_again>::run};

KVTIER_COMPILED(Plain, )
#if KVTIER_X86
#if defined(__clang__)  // does not know the last one
#define KVTIER_WIDE_LOOPS
#else
#define KVTIER_WIDE_LOOPS ",prefer-vector-width=512"
#endif
#define KVTIER_LINES \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2" KVTIER_WIDE_LOOPS)))
KVTIER_COMPILED(Half, KVTIER_AVX2)
KVTIER_COMPILED(Whole, KVTIER_LINES)

// Intrinsics for bf16: q8 decodes at 0.85 of the speed of memcpy with them, and at 0.71 with the
// plain loop and a copy of its lines that bypasses the caches.
KVTIER_LINES KVTIER_LOOP __m512i rounded16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    // Rounds to the nearest, ties to even: 0x8000 if the last remaining bit is set.
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i down = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    return _mm512_mask_add_epi32(down, odd, bits, _mm512_set1_epi32(0x8000));
}
KVTIER_LINES KVTIER_LOOP __m512i values16(const uint8_t* codes, __m512 base, __m512 step) {
    const __m512i wide =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return rounded16(_mm512_add_ps(base, _mm512_mul_ps(_mm512_cvtepi32_ps(wide), step)));
}

// The upper halves of 32 floats, as one line.
template <bool kStreaming>
KVTIER_LINES KVTIER_LOOP void put_uppers(uint8_t* out, __m512i low, __m512i high) {
    const __m512i uppers =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i both = _mm512_permutex2var_epi16(low, uppers, high);
    if constexpr (kStreaming) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), both);
    } else {
        _mm512_storeu_si512(out, both);
    }
}

// The same for codes of e2m1, without a base.
KVTIER_LINES KVTIER_LOOP __m512i small16(const uint8_t* codes, __m512 step) {
    const __m512 sizes = _mm512_set_ps(-12, -8, -6, -4, -3, -2, -1, 0, 12, 8, 6, 4, 3, 2, 1, 0);
    const __m512i wide =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return rounded16(_mm512_mul_ps(_mm512_permutexvar_ps(wide, sizes), step));
}

template <bool kByToken, bool kStreaming>
KVTIER_LINES void values_bf16(const uint8_t* codes, size_t rows, size_t channels, const float* base,
                              const float* step, uint8_t* out) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t at = 0; at < channels; at += kUnit, codes += kUnit, out += 2 * kUnit) {
            __m512i found[4];
            if (kByToken) {
                const __m512 b = _mm512_set1_ps(*base++), s = _mm512_set1_ps(*step++);
                for (size_t i = 0; i < 4; i++) found[i] = values16(codes + 16 * i, b, s);
            } else {
                for (size_t i = 0; i < 4; i++) {
                    found[i] = values16(codes + 16 * i, _mm512_loadu_ps(base + at + 16 * i),
                                        _mm512_loadu_ps(step + at + 16 * i));
                }
            }
            put_uppers<kStreaming>(out, found[0], found[1]);
            put_uppers<kStreaming>(out + kUnit, found[2], found[3]);
        }
    }
}

// kMost: the channels of a group, or 0 if there is a step for each channel.
template <size_t kMost, bool kStreaming>
KVTIER_LINES void small_bf16(const uint8_t* codes, size_t rows, size_t channels, const float*,
                             const float* step, uint8_t* out) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t at = 0; at < channels; at += kUnit, codes += kUnit, out += 2 * kUnit) {
            __m512i found[4];
            for (size_t i = 0; i < 4; i++) {
                const __m512 mine = kMost == 0 ? _mm512_loadu_ps(step + at + 16 * i)
                                               : _mm512_set1_ps(step[kMost == 16 ? i : i / 2]);
                found[i] = small16(codes + 16 * i, mine);
            }
            if (kMost != 0) step += kUnit / kMost;
            put_uppers<kStreaming>(out, found[0], found[1]);
            put_uppers<kStreaming>(out + kUnit, found[2], found[3]);
        }
    }
}

// The largest magnitude of each 16 or 32 elements, of rows of whole heads.
template <size_t kMost>
KVTIER_LINES void group_sizes_bf16(const uint8_t* in, size_t elements, float* sizes) {
    const __m512i lanes = kMost == 16 ? _mm512_castsi128_si512(_mm_set_epi32(24, 16, 8, 0))
                                      : _mm512_castsi128_si512(_mm_set_epi32(0, 0, 16, 0));
    for (size_t at = 0; at < elements; at += kUnit, sizes += kUnit / kMost) {
        __m512i found[2];
        for (size_t i = 0; i < 2; i++) {
            const __m512i words = _mm512_loadu_si512(in + 2 * at + 64 * i);
            __m512i most = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
            most = _mm512_max_epu16(most, _mm512_shuffle_epi32(most, _MM_PERM_BADC));
            most = _mm512_max_epu16(most, _mm512_shuffle_epi32(most, _MM_PERM_CDAB));
            most = _mm512_max_epu16(most, _mm512_rol_epi32(most, 16));
            most = _mm512_max_epu16(most, _mm512_shuffle_i64x2(most, most, 0xB1));
            if (kMost == 32) {
                most = _mm512_max_epu16(most, _mm512_shuffle_i64x2(most, most, 0x4E));
            }
            found[i] = _mm512_slli_epi32(most, 16);
        }
        const __m512i both = _mm512_permutex2var_epi32(found[0], lanes, found[1]);
        const __m128i few = _mm512_castsi512_si128(both);
        if (kMost == 16) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(sizes), few);
        } else {
            _mm_storel_epi64(reinterpret_cast<__m128i*>(sizes), few);
        }
    }
}

// Codes of e2m1 in the lowest bits of each lane; 8 and more count as 7.
KVTIER_LINES KVTIER_LOOP __m512i small_code(__m512i bits, __m512 inverse) {
    const __m512 z = _mm512_mul_ps(_mm512_castsi512_ps(bits), inverse);
    const __m512 half = _mm512_add_ps(_mm512_mul_ps(z, _mm512_set1_ps(0.5F)), _mm512_set1_ps(2.0F));
    const __m512 quarter =
        _mm512_add_ps(_mm512_mul_ps(z, _mm512_set1_ps(0.25F)), _mm512_set1_ps(4.0F));
    const __m512 least = _mm512_min_ps(_mm512_min_ps(z, half), quarter);
    return _mm512_castps_si512(_mm512_add_ps(least, _mm512_set1_ps(8388608.0F)));
}

// Packed units of such codes. kMost: as above; inverses of channels have the order of `apart`.
template <size_t kMost>
KVTIER_LINES void small_units_bf16(const uint8_t* in, size_t units, size_t channels,
                                   const float* inverse, uint8_t* packed) {
    size_t channel = 0;
    for (size_t unit = 0; unit < units; unit++, in += 2 * kUnit, packed += kUnit / 2) {
        __m512i codes[2];
        for (size_t i = 0; i < 2; i++) {
            const __m512i words = _mm512_loadu_si512(in + 64 * i);
            const __m512i even =
                _mm512_and_si512(_mm512_slli_epi32(words, 16), _mm512_set1_epi32(0x7FFFFFFF));
            const __m512i odd = _mm512_and_si512(words, _mm512_set1_epi32(0x7FFF0000));
            __m512 by, other;
            if constexpr (kMost == 0) {
                by = _mm512_loadu_ps(inverse + channel + 32 * i);
                other = _mm512_loadu_ps(inverse + channel + 32 * i + 16);
            } else if constexpr (kMost == 16) {
                by = other = _mm512_mask_mov_ps(_mm512_set1_ps(inverse[2 * i]), 0xFF00,
                                                _mm512_set1_ps(inverse[2 * i + 1]));
            } else {
                by = other = _mm512_set1_ps(inverse[i]);
            }
            const __m512i low = _mm512_and_si512(small_code(even, by), _mm512_set1_epi32(15));
            const __m512i high = _mm512_slli_epi32(small_code(odd, other), 16);
            const __m512i sizes =
                _mm512_min_epu16(_mm512_or_si512(low, high), _mm512_set1_epi16(7));
            const __m512i signs =
                _mm512_and_si512(_mm512_srli_epi16(words, 12), _mm512_set1_epi16(8));
            codes[i] = _mm512_or_si512(sizes, signs);
        }
        const __m512i both = _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed), _mm512_cvtepi16_epi8(both));
        if constexpr (kMost == 0) {
            channel = channel + kUnit == channels ? 0 : channel + kUnit;
        } else {
            inverse += kUnit / kMost;
        }
    }
}

// Of each 32 numbers, those at even places first.
KVTIER_LINES void apart(float* numbers, size_t count) {
    const __m512i evens =
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    for (size_t i = 0; i < count; i += 32) {
        const __m512 low = _mm512_loadu_ps(numbers + i), high = _mm512_loadu_ps(numbers + i + 16);
        _mm512_storeu_ps(numbers + i, _mm512_permutex2var_ps(low, evens, high));
        _mm512_storeu_ps(numbers + i + 16, _mm512_permutex2var_ps(low, odds, high));
    }
}

// e5m2 of 64 elements at a time; returns the largest magnitude.
constexpr size_t kHalvesAhead = 2048;  // bytes that are prefetched
KVTIER_LINES KVTIER_LOOP __m512i halved32(__m512i words, __m512i& most) {
    const __m512i size = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
    most = _mm512_max_epu16(most, size);
    const __mmask32 odd = _mm512_test_epi16_mask(size, _mm512_set1_epi16(0x20));
    __m512i sum = _mm512_add_epi16(size, _mm512_set1_epi16(0xF - (112 << 7)));
    sum = _mm512_mask_add_epi16(sum, odd, sum, _mm512_set1_epi16(1));
    __m512i code = _mm512_srli_epi16(sum, 5);
    const __mmask32 below = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(0x3880));
    if (below != 0) {
        const __m512i one = _mm512_set1_epi16(1);
        __m512i few = _mm512_setzero_si512();
        for (const int least : {0x3701, 0x37C0, 0x3821, 0x3860}) {
            const __m512i bar = _mm512_set1_epi16(static_cast<int16_t>(least));
            const __mmask32 above = _mm512_cmpge_epu16_mask(size, bar);
            few = _mm512_mask_add_epi16(few, above, few, one);
        }
        code = _mm512_mask_mov_epi16(code, below, few);
    }
    const __m512i sign = _mm512_srli_epi16(words, 8);
    return _mm512_or_si512(code, _mm512_and_si512(sign, _mm512_set1_epi16(0x80)));
}
template <bool kStreaming>
KVTIER_LINES float halves_bf16(const uint8_t* in, size_t count, uint8_t* codes) {
    __m512i most = _mm512_setzero_si512();
    size_t i = 0;
    if constexpr (kStreaming) i = std::min(count, (0 - reinterpret_cast<uintptr_t>(codes)) % 64);
    const float before = halves<Element::kBf16>(in, i, codes);
    for (; i + 64 <= count; i += 64) {
        __builtin_prefetch(in + 2 * i + kHalvesAhead);
        __builtin_prefetch(in + 2 * i + kHalvesAhead + 64);
        const __m512i low = halved32(_mm512_loadu_si512(in + 2 * i), most);
        const __m512i high = halved32(_mm512_loadu_si512(in + 2 * i + 64), most);
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)),
                                                _mm512_cvtepi16_epi8(high), 1);
        if constexpr (kStreaming) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(codes + i), both);
        } else {
            _mm512_storeu_si512(codes + i, both);
        }
    }
    uint16_t each[32];
    _mm512_storeu_si512(each, most);
    const uint16_t found = *std::max_element(each, each + 32);
    const float after = halves<Element::kBf16>(in + 2 * i, count - i, codes + i);
    return std::max({Value<Element::kBf16>::widened(found), before, after});
}

template <bool kStreaming>
KVTIER_LINES void wholes_bf16(const uint8_t* codes, size_t count, uint8_t* out) {
    const __m512i few = _mm512_set1_epi64(0x3840'3800'3780'0000);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i wide =
            _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
        const __m512i size = _mm512_and_si512(wide, _mm512_set1_epi16(0x7F));
        const __mmask32 below = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(4));
        __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(size, 5), _mm512_set1_epi16(112 << 7));
        bits = _mm512_mask_permutexvar_epi16(bits, below, size, few);
        const __m512i sign =
            _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16(-0x8000));
        bits = _mm512_or_si512(bits, sign);
        if constexpr (kStreaming) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out + 2 * i), bits);
        } else {
            _mm512_storeu_si512(out + 2 * i, bits);
        }
    }
    wholes<Element::kBf16>(codes + i, count - i, out + 2 * i);
}
#endif

const LevelKernels& level() { return KVTIER_LEVELS(kLevel<Plain>, kLevel<Half>, kLevel<Whole>); }

// --- independent of the processor ----------------------------------------------------------------

uint16_t upper(float value) { return static_cast<uint16_t>(codec::bits_of(value) >> 16); }

// The sizes of a part, if it has the layout of the grid.
struct Plan {
    Plan(Codec codec, Element element, const Grid& is, size_t raw_bytes)
        : grid(is), form(fixed_form(fixed_rate(codec))), type(static_cast<size_t>(element)) {
        if (type >= kQuantizedTypes || grid.rows == 0 || grid.channels == 0 || grid.head == 0 ||
            grid.channels > kChannelsMost || grid.channels % grid.head != 0) {
            return;
        }
        width = element == Element::kFp32 ? 4 : 2;
        const size_t matrix = size_t{grid.rows} * grid.channels * width;
        if (raw_bytes == 0 || raw_bytes % matrix != 0) return;
        rows = raw_bytes / width / grid.channels;
        groups = grid.channels / grid.head * groups_of(grid.head, form.channels);
        const size_t spans = (size_t{grid.rows} + form.tokens - 1) / form.tokens;
        const size_t steps =
            grid.by_token ? rows * groups : raw_bytes / matrix * spans * grid.channels;
        params = form.part_bytes + steps * form.step_bytes;
        codes = (rows * grid.channels + kUnit - 1) / kUnit * kUnit * form.bits / 8;
        size = kQuantizedHeader + params + codes;
    }

    // The number of rows from this one on that share their channels' steps, or have their own.
    size_t span(size_t row) const {
        if (grid.by_token) return std::min(tile(), rows - row);
        const size_t within = row % grid.rows;
        return std::min(form.tokens - within % form.tokens, grid.rows - within);
    }
    // The number of rows that are processed at a time.
    size_t tile() const { return std::max<size_t>(1, kTile / grid.channels); }
    bool small() const { return form.step_bytes == 1; }
    // The kernels of a type: which of them to use.
    size_t kind() const {
        const size_t first = form.said == kFp8Bits     ? 2
                             : form.said == kNvfp4Bits ? 4
                             : form.said == kMxfp4Bits ? 6
                                                       : 0;
        return first + (grid.by_token ? 1 : 0);
    }
    size_t lines(size_t count) const { return grid.by_token ? count : 1; }
    size_t line() const { return grid.by_token ? groups : grid.channels; }

    static constexpr size_t kTile = 4096;  // elements, unless a row has more

    Grid grid;
    FixedForm form;
    size_t type, width = 0;
    size_t rows = 0, groups = 0, params = 0, codes = 0;
    size_t size = 0;  // zero if the part cannot be encoded
};

// The buffers of a thread, because stacks are small.
struct Scratch {
    std::vector<float> low, high, base, step;
    std::vector<uint8_t> codes, packed, values;

    void fit(const Plan& plan) {
        const size_t steps = plan.grid.by_token ? plan.tile() * plan.groups : plan.grid.channels;
        const size_t elements = plan.tile() * plan.grid.channels;
        for (auto* numbers : {&low, &high, &base, &step}) numbers->resize(steps);
        // With space for the rest of the previous rows: less than a tile and less than a unit.
        codes.resize(elements + Plan::kTile + kUnit);
        // Or for a span of 16 or 32 rows, in half bytes.
        packed.resize(std::max(elements + Plan::kTile + kUnit, size_t{16} * plan.grid.channels));
        values.resize(std::max(elements, Plan::kTile) * plan.width);
    }
};

Scratch& scratch(const Plan& plan) {
    thread_local Scratch kept;
    kept.fit(plan);
    return kept;
}

// Prefetches the next input during the computation.
void fetch(const uint8_t* at, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Packs codes as they arrive, in whole units.
class Packer {
 public:
    Packer(const Plan& plan, bool streaming, Scratch& kept, uint8_t* out)
        : bits_(plan.form.bits), streaming_(streaming), kept_(kept), out_(out) {}

    uint8_t* room() { return kept_.codes.data() + held_; }
    void add(size_t count) {
        held_ += count;
        if (held_ >= Plan::kTile) put(held_ / kUnit);
    }
    void finish() {
        const size_t units = (held_ + kUnit - 1) / kUnit;
        std::memset(room(), 0, units * kUnit - held_);
        put(units);
    }

 private:
    void put(size_t units) {
        const LevelKernels& by = level();
        const uint8_t* from = kept_.packed.data();
        if (bits_ == 8) {
            from = kept_.codes.data();
        } else {
            (bits_ == 4 ? by.pack4 : by.pack2)(kept_.codes.data(), units, kept_.packed.data());
        }
        const size_t nbytes = units * kUnit * bits_ / 8;
        put_bytes(out_, from, nbytes, streaming_);
        out_ += nbytes;
        held_ -= std::min(held_, units * kUnit);
        std::memmove(kept_.codes.data(), kept_.codes.data() + units * kUnit, held_);
    }

    unsigned bits_;
    bool streaming_;
    Scratch& kept_;
    uint8_t* out_;
    size_t held_ = 0;
};

// Unpacks codes in any amounts.
class Unpacker {
 public:
    Unpacker(const Plan& plan, Scratch& kept, const uint8_t* in)
        : bits_(plan.form.bits), kept_(kept), in_(in) {}

    // The next `count` codes; valid until the next call.
    const uint8_t* take(size_t count) {
        if (bits_ == 8) {
            in_ += count;
            fetch(in_, count);
            return in_ - count;
        }
        uint8_t* const codes = kept_.codes.data();
        held_ -= taken_;
        std::memmove(codes, codes + taken_, held_);
        taken_ = count;
        if (held_ < count) {
            const LevelKernels& by = level();
            const size_t units = (count - held_ + kUnit - 1) / kUnit;
            (bits_ == 4 ? by.unpack4 : by.unpack2)(in_, units, codes + held_);
            in_ += units * kUnit * bits_ / 8;
            fetch(in_, units * kUnit * bits_ / 8);
            held_ += units * kUnit;
        }
        return codes;
    }

 private:
    unsigned bits_;
    Scratch& kept_;
    const uint8_t* in_;
    size_t held_ = 0, taken_ = 0;
};

constexpr uint32_t kLargest[kQuantizedTypes] = {Value<Element::kBf16>::kLargest,
                                                Value<Element::kFp16>::kLargest,
                                                Value<Element::kFp32>::kLargest};

// Writes the steps of these lines, fills the kernels' inputs; false if a group has no valid steps.
bool make_steps(const Plan& plan, size_t lines, Scratch& kept, uint8_t*& out) {
    const size_t count = plan.line();
    for (size_t line = 0, at = 0; line < lines; line++) {
        for (size_t i = 0; i < count; i++, at++) {
            Steps steps;
            const float low = kept.low[at], high = kept.high[at];
            const bool found =
                plan.form.said == kFp8Bits
                    ? float_steps_of(kLargest[plan.type], low, high, steps)
                    : steps_of(plan.form.bits, kLargest[plan.type], low, high, steps);
            if (!found) return false;
            kept.base[at] = steps.base;
            kept.step[at] = inverse_of(steps.step);
            const uint16_t base = upper(steps.base), step = upper(steps.step);
            std::memcpy(out + 2 * i, plan.form.bits == 8 ? &step : &base, 2);
            if (plan.form.bits != 8) std::memcpy(out + 2 * (count + i), &step, 2);
        }
        out += plan.form.step_bytes * count;
    }
    return true;
}

void read_steps(const Plan& plan, size_t lines, const uint8_t*& in, Scratch& kept) {
    const size_t count = plan.line();
    float *base = kept.base.data(), *step = kept.step.data();
    if (plan.form.bits == 8) {
        for (size_t i = 0; i < lines * count; i++) {
            step[i] = loaded<Element::kBf16>(in + 2 * i);
            base[i] = base_of(step[i]);
        }
        in += 2 * lines * count;
        return;
    }
    for (size_t line = 0; line < lines; line++, base += count, step += count, in += 4 * count) {
        for (size_t i = 0; i < count; i++) {
            base[i] = loaded<Element::kBf16>(in + 2 * i);
            step[i] = loaded<Element::kBf16>(in + 2 * (count + i));
        }
    }
}

// False if a value would not be finite as e5m2.
bool encode_halves(const Plan& plan, const uint8_t* in, bool streaming, Scratch& kept,
                   uint8_t* out) {
    const auto encode = level().types[plan.type].halves;
    const size_t all = plan.rows * plan.grid.channels;
    std::memset(out + all, 0, plan.codes - all);
#if KVTIER_X86
    if (codec_choice().level() == Level::kVbmi && plan.type == 0) {
        const auto by_hand = streaming ? halves_bf16<true> : halves_bf16<false>;
        return by_hand(in, all, out) < float_of(kE5m2End);
    }
#endif
    for (size_t done = 0; done < all;) {
        const size_t count = std::min(Plan::kTile, all - done);
        fetch(in + count * plan.width, count * plan.width);
        const float most = encode(in, count, kept.codes.data());
        if (!(most < float_of(kE5m2End))) return false;
        put_bytes(out, kept.codes.data(), count, streaming);
        in += count * plan.width, out += count, done += count;
    }
    return true;
}

void decode_halves(const Plan& plan, const uint8_t* codes, bool streaming, Scratch& kept,
                   uint8_t* out) {
    const auto decode = level().types[plan.type].wholes;
    const size_t all = plan.rows * plan.grid.channels;
    for (size_t done = 0; done < all;) {
        const size_t count = std::min(Plan::kTile, all - done), nbytes = count * plan.width;
        fetch(codes + count, count);
        if (streaming) prefetch_pages(out + kPagesAhead, nbytes);
#if KVTIER_X86
        if (codec_choice().level() == Level::kVbmi && plan.type == 0 &&
            (!streaming || reinterpret_cast<uintptr_t>(out) % 64 == 0)) {
            (streaming ? wholes_bf16<true> : wholes_bf16<false>)(codes, count, out);
            codes += count, out += nbytes, done += count;
            continue;
        }
#endif
        decode(codes, count, streaming ? kept.values.data() : out);
        if (streaming) put_bytes(out, kept.values.data(), nbytes, true);
        codes += count, out += nbytes, done += count;
    }
}

// nvfp4 and mxfp4 of rows of one span, in packed units; false if that is not possible.
bool units_by_hand(const Plan& plan, const uint8_t* in, size_t rows, float scale, Scratch& kept,
                   uint8_t* steps) {
#if KVTIER_X86
    const Grid& grid = plan.grid;
    if (codec_choice().level() != Level::kVbmi || plan.type != 0 ||
        (grid.by_token ? grid.head : grid.channels) % kUnit != 0) {
        return false;
    }
    const size_t elements = rows * grid.channels, count = plan.lines(rows) * plan.line();
    float* const inverse = kept.step.data();
    const bool many = plan.form.channels == 16;
    if (grid.by_token) {
        (many ? group_sizes_bf16<16> : group_sizes_bf16<32>)(in, elements, inverse);
    } else {
        level().types[0].sizes[0](in, rows, grid.channels, grid.head, inverse);
    }
    level().small_steps(plan.form.said, scale, count, inverse, steps);
    if (!grid.by_token) apart(inverse, count);
    const auto by = !grid.by_token ? small_units_bf16<0>
                    : many         ? small_units_bf16<16>
                                   : small_units_bf16<32>;
    by(in, elements / kUnit, grid.channels, inverse, kept.packed.data());
    return true;
#else
    return false;
#endif
}

}  // namespace

size_t encode_quantized(Codec codec, Element is, const Encoded& part, bool streaming,
                        uint8_t* out) {
    const Plan plan(codec, is, part.grid, part.raw_bytes);
    if (plan.size == 0 || plan.size >= part.raw_bytes) return kNoRoom;
    std::memset(out, 0, kQuantizedHeader);
    out[kElementAt] = static_cast<uint8_t>(is);
    out[kBitsAt] = static_cast<uint8_t>(plan.form.said);
    out[kByTokenAt] = plan.grid.by_token;
    put32(out + kRowsAt, plan.grid.rows);
    put32(out + kChannelsAt, plan.grid.channels);
    put32(out + kHeadAt, plan.grid.head);
    Scratch& kept = scratch(plan);
    uint8_t* params = out + kQuantizedHeader;
    if (plan.form.step_bytes == 0) {
        return encode_halves(plan, part.raw, streaming, kept, params) ? plan.size : kNoRoom;
    }
    Packer packer(plan, streaming, kept, params + plan.params);
    const TypeKernels& by = level().types[plan.type];
    const Grid& grid = plan.grid;
    const uint8_t* in = part.raw;
    float scale = 0;
    if (plan.small()) {
        const float most = by.largest(in, plan.rows * grid.channels);
        if (!small_fits(plan.form.said, kLargest[plan.type], most)) return kNoRoom;
        if (plan.form.said == kNvfp4Bits) {
            scale = part_scale_of(most);
            put32(params, codec::bits_of(scale));
            params += plan.form.part_bytes;
        }
    }
    uint8_t* codes = out + kQuantizedHeader + plan.params;
    for (size_t row = 0; row < plan.rows;) {
        const size_t span = plan.span(row), elements = span * grid.channels;
        // All of a part is read before the first code: what follows it is probably the next part.
        const size_t ahead = plan.small() ? part.raw_bytes : elements * plan.width;
        if (plan.small()) {
            const size_t steps = plan.lines(span) * plan.line();
            if (units_by_hand(plan, in, span, scale, kept, params)) {
                fetch(in + ahead, elements * plan.width);
                put_bytes(codes, kept.packed.data(), elements / 2, streaming);
                codes += elements / 2, in += elements * plan.width;
                params += steps, row += span;
                continue;
            }
            const size_t sizes = grid.by_token ? plan.form.channels / 16 : 0;
            by.sizes[sizes](in, span, grid.channels, grid.head, kept.step.data());
            level().small_steps(plan.form.said, scale, steps, kept.step.data(), params);
            params += steps;
        } else {
            by.ranges[grid.by_token](in, span, grid.channels, grid.head, kept.low.data(),
                                     kept.high.data());
            if (!make_steps(plan, plan.lines(span), kept, params)) return kNoRoom;
        }
        for (size_t done = 0; done < span;) {
            const size_t rows = std::min(plan.tile(), span - done);
            fetch(in + ahead, rows * grid.channels * plan.width);
            by.codes[plan.kind()](in, rows, grid.channels, grid.head, kept.base.data(),
                                  kept.step.data(), packer.room());
            packer.add(rows * grid.channels);
            in += rows * grid.channels * plan.width;
            done += rows;
        }
        row += span;
    }
    packer.finish();
    return plan.size;
}

// Decodes values directly to their destination; returns false if that is not possible.
bool values_by_hand(const Plan& plan, const uint8_t* codes, size_t rows, const Scratch& kept,
                    uint8_t* out, bool streaming) {
#if KVTIER_X86
    const Grid& grid = plan.grid;
    const bool units = (grid.by_token ? grid.head : grid.channels) % kUnit == 0;
    if (codec_choice().level() == Level::kVbmi && plan.type == 0 && units &&
        plan.form.said != kFp8Bits && (!streaming || reinterpret_cast<uintptr_t>(out) % 64 == 0)) {
        // By the steps: of each channel, or of groups of 64, 16 or 32 channels.
        constexpr decltype(&values_bf16<false, false>) kBy[5][2] = {
            {values_bf16<false, false>, values_bf16<false, true>},
            {values_bf16<true, false>, values_bf16<true, true>},
            {small_bf16<0, false>, small_bf16<0, true>},
            {small_bf16<16, false>, small_bf16<16, true>},
            {small_bf16<32, false>, small_bf16<32, true>}};
        const size_t which = !plan.small()    ? grid.by_token
                             : !grid.by_token ? 2
                                              : 2 + plan.form.channels / 16;
        kBy[which][streaming](codes, rows, grid.channels, kept.base.data(), kept.step.data(), out);
        return true;
    }
#endif
    return false;
}

bool decode_quantized(Element is, const Decoded& part, bool streaming) {
    if (part.bytes < kQuantizedHeader) return false;
    const uint8_t* const from = part.from;
    const Grid grid = {get32(from + kRowsAt), get32(from + kChannelsAt), get32(from + kHeadAt),
                       from[kByTokenAt] != 0};
    const Plan plan(part.codec, is, grid, part.raw_bytes);
    if (plan.size == 0 || plan.size != part.bytes || from[kByTokenAt] > 1 || from[3] != 0 ||
        from[kElementAt] != static_cast<uint8_t>(is) || from[kBitsAt] != plan.form.said) {
        return false;
    }
    Scratch& kept = scratch(plan);
    const uint8_t* params = from + kQuantizedHeader;
    if (plan.form.step_bytes == 0) {
        decode_halves(plan, params, streaming, kept, part.raw);
        return true;
    }
    Unpacker unpacker(plan, kept, params + plan.params);
    float scale = 0;
    if (plan.form.said == kNvfp4Bits) {
        scale = float_of(get32(params));
        if (!part_scale_fits(kLargest[plan.type], scale)) return false;
        params += plan.form.part_bytes;
    }
    const TypeKernels& by = level().types[plan.type];
    uint8_t* out = part.raw;
    for (size_t row = 0; row < plan.rows;) {
        const size_t span = plan.span(row);
        if (plan.small()) {
            const size_t steps = plan.lines(span) * plan.line();
            level().steps_again(plan.form.said, scale, steps, params, kept.step.data());
            params += steps;
        } else {
            read_steps(plan, plan.lines(span), params, kept);
        }
        for (size_t done = 0; done < span;) {
            const size_t rows = std::min(plan.tile(), span - done);
            const size_t elements = rows * grid.channels, nbytes = elements * plan.width;
            const uint8_t* const codes = unpacker.take(elements);
            if (streaming) prefetch_pages(out + kPagesAhead, nbytes);
            if (!values_by_hand(plan, codes, rows, kept, out, streaming)) {
                by.values[plan.kind()](codes, rows, grid.channels, grid.head, kept.base.data(),
                                       kept.step.data(), streaming ? kept.values.data() : out);
                if (streaming) put_bytes(out, kept.values.data(), nbytes, true);
            }
            out += nbytes, done += rows;
        }
        row += span;
    }
    return true;
}

}  // namespace kvtier::codec
