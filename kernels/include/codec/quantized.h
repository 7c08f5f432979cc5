// The arithmetic of the codecs with a fixed rate, for every compiler: the CPU's kernels are
// compiled from it, and a GPU's kernels include it. A multiplication and an addition are rounded
// separately, because not every processor has a fused operation. This needs -ffp-contract=off.
//
// A part consists of rows of channels, one row per token; after `rows` rows another matrix begins
// (the next head of the engine's layout). In a group of elements, which is the tokens of one
// channel or the channels of one token, the minimum and the maximum give a base and a step, and
// each element is base + code * step. Small floats (e4m3, e2m1) have a step and no base; e5m2 has
// neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/lossless.h"

namespace kvtier::codec {

inline constexpr size_t kQuantizedTypes = 3;  // bf16, fp16, fp32
inline constexpr size_t kChannelsMost = size_t{1} << 16;
inline constexpr size_t kUnit = 64;  // codes that are packed together

// The positions of the numbers in an encoded part; see docs/formats.md.
inline constexpr size_t kBitsAt = 1, kByTokenAt = 2, kRowsAt = 4, kChannelsAt = 8, kHeadAt = 12;
inline constexpr size_t kQuantizedHeader = 16;

// What a header says in addition to the bits of a code: q8, q4 and q2 say nothing, fp8 and nvfp4
// kFloating, e5m2 and mxfp4 kBinary.
inline constexpr unsigned kFloating = 16, kBinary = 32;
inline constexpr unsigned kFp8Bits = 8 | kFloating, kE5m2Bits = 8 | kBinary,
                          kNvfp4Bits = 4 | kFloating, kMxfp4Bits = 4 | kBinary;

// What a codec with these bits in its header stores.
struct FixedForm {
    unsigned said, bits;      // in the header; of a code
    size_t tokens, channels;  // of a group at most: tokens of a channel, or channels of a token
    size_t step_bytes;        // of a group
    size_t part_bytes;        // of a part, before the steps
};
KVTIER_HD constexpr FixedForm fixed_form(unsigned said) {
    switch (said) {
        case kE5m2Bits:
            return {said, 8, 256, 64, 0, 0};
        case kNvfp4Bits:
            return {said, 4, 16, 16, 1, 4};
        case kMxfp4Bits:
            return {said, 4, 32, 32, 1, 0};
        default:
            return {said, said % kFloating, 256, 64, said % kFloating == 8 ? size_t{2} : 4, 0};
    }
}

KVTIER_HD inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
KVTIER_HD inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// An element as a float, and as an integer of the same order. Infinities, NaN of fp16: >= 65536.
template <Element kIs>
struct Value;

template <>
struct Value<Element::kBf16> {
    using Bits = uint16_t;
    using Order = int16_t;
    static constexpr uint32_t kLargest = 0x7F7F0000;
    KVTIER_HD static float widened(uint16_t bits) { return float_of(uint32_t{bits} << 16); }
    KVTIER_HD static uint16_t narrowed(float value) {
        const uint32_t bits = bits_of(value);
        return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

template <>
struct Value<Element::kFp16> {
    using Bits = uint16_t;
    using Order = int16_t;
    static constexpr uint32_t kLargest = 0x477FE000;  // 65504
    KVTIER_HD static float widened(uint16_t bits) {
        const float size = float_of((bits & 0x7FFFu) << 13) * float_of(0x77800000);  // 2^112
        return float_of(bits_of(size) | (bits & 0x8000u) << 16);
    }
    KVTIER_HD static uint16_t narrowed(float value) {
        // Branch-free: compilers do not vectorize a condition around an addition that could trap.
        const uint32_t bits = bits_of(value);
        const auto size = static_cast<int32_t>(bits & 0x7FFFFFFF);
        const int32_t normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
        // Below 2^-14 the last bit of the sum is that of fp16.
        const auto near =
            static_cast<int32_t>(bits_of(float_of(static_cast<uint32_t>(size)) + 0.5F));
        const int32_t below = (size - 0x38800000) >> 31;
        const int32_t half = ((near - 0x3F000000) & below) | (normal & ~below);
        return static_cast<uint16_t>(static_cast<uint32_t>(half) | (bits >> 16 & 0x8000));
    }
};

template <>
struct Value<Element::kFp32> {
    using Bits = uint32_t;
    using Order = int32_t;
    static constexpr uint32_t kLargest = 0x7F7FFFFF;
    KVTIER_HD static float widened(uint32_t bits) { return float_of(bits); }
    KVTIER_HD static uint32_t narrowed(float value) { return bits_of(value); }
};

// Its own inverse: keeps the sign, and reverses the order of negative values.
template <typename Order>
KVTIER_HD inline Order turned(Order bits) {
    constexpr Order kSize = static_cast<Order>(~(Order{1} << (8 * sizeof(Order) - 1)));
    return static_cast<Order>(bits ^ ((bits >> (8 * sizeof(Order) - 1)) & kSize));
}

// Stored as upper halves of floats. With 8 bits only the step is, and the base is -127 steps.
struct Steps {
    float base, step;
};

KVTIER_HD inline uint32_t levels_of(unsigned bits) { return bits == 8 ? 254 : (1u << bits) - 1; }
KVTIER_HD inline float base_of(float step) { return -127.0F * step; }

// The steps from the minimum and maximum of a group. Returns false if the group contains NaN or
// infinity, or values so large that a decoded one could be infinite.
KVTIER_HD inline bool steps_of(unsigned bits, uint32_t largest_bits, float least, float most,
                               Steps& steps) {
    const float largest = float_of(largest_bits);
    if (!(least >= -largest && most <= largest)) return false;
    float wide;
    if (bits == 8) {
        wide = (-least > most ? -least : most) / 127.0F;
    } else {
        const uint32_t down = bits_of(least) + (least < 0 ? 0xFFFF : 0);
        steps.base = float_of(down & 0xFFFF0000);
        wide = (most - steps.base) / static_cast<float>(levels_of(bits));
    }
    if (wide > 0 && wide < float_of(0x00800000))
        wide = float_of(0x00800000);  // otherwise 1 / step would be infinite
    steps.step = float_of((bits_of(wide) + 0xFFFF) & 0xFFFF0000);
    if (bits == 8) steps.base = base_of(steps.step);
    const float top = steps.base + steps.step * static_cast<float>(levels_of(bits));
    return steps.base >= -largest && top <= largest;
}

KVTIER_HD inline float inverse_of(float step) { return step > 0 ? 1.0F / step : 0.0F; }

// Between the minimum and the maximum of the group, this does not exceed the number of levels.
KVTIER_HD inline uint8_t code_of(float value, float base, float inverse) {
    return static_cast<uint8_t>(static_cast<int32_t>((value - base) * inverse + 0.5F));
}

KVTIER_HD inline float value_of(uint8_t code, float base, float step) {
    return base + static_cast<float>(static_cast<int32_t>(code)) * step;
}

// fp8: a code is a float of 8 bits (e4m3: no infinity, maximum 448) of the value divided by a step.
inline constexpr float kFloatMost = 448.0F;

// Rounds to the nearest, ties to even.
KVTIER_HD inline uint8_t e4m3_of(float value) {
    // Branch-free, as above.
    const uint32_t bits = bits_of(value);
    const auto size = static_cast<int32_t>(bits & 0x7FFFFFFF);
    const int32_t normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3);
    // Below 2^-6 the last bit of the sum is that of e4m3.
    const auto near =
        static_cast<int32_t>(bits_of(float_of(static_cast<uint32_t>(size)) + 16384.0F));
    const int32_t below = (size - 0x3C800000) >> 31;
    const int32_t code = ((near - 0x46800000) & below) | (normal & ~below);
    const auto kept = static_cast<uint32_t>(code < 0x7E ? code : 0x7E);
    return static_cast<uint8_t>(kept | (bits >> 24 & 0x80));
}
KVTIER_HD inline float float_of_e4m3(uint8_t code) {
    const float size = float_of((code & 0x7Fu) << 20) * float_of(0x7B800000);  // 2^120
    return float_of(bits_of(size) | (code & 0x80u) << 24);
}

// Like `steps_of`, without a base.
KVTIER_HD inline bool float_steps_of(uint32_t largest_bits, float least, float most, Steps& steps) {
    const float largest = float_of(largest_bits);
    if (!(least >= -largest && most <= largest)) return false;
    float wide = (-least > most ? -least : most) / kFloatMost;
    if (wide > 0 && wide < float_of(0x00800000)) wide = float_of(0x00800000);
    steps.base = 0;
    steps.step = float_of((bits_of(wide) + 0xFFFF) & 0xFFFF0000);
    return steps.step * kFloatMost <= largest;
}

// e5m2: the upper byte of fp16, rounded to the nearest, ties to even. Only for values below 61440,
// which all become finite.
inline constexpr uint32_t kE5m2End = 0x47700000;
KVTIER_HD inline uint8_t e5m2_of(float value) {
    // Branch-free, as above.
    const uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFF;
    const auto normal =
        static_cast<int32_t>((size + 0xFFFFF + (size >> 21 & 1)) >> 21) - (112 << 2);
    // Below 2^-14 the last bit of the sum is that of e5m2.
    const auto near = static_cast<int32_t>(bits_of(float_of(size) + 128.0F));
    const int32_t below = (static_cast<int32_t>(size) - 0x38800000) >> 31;
    const int32_t code = ((near - 0x43000000) & below) | (normal & ~below);
    return static_cast<uint8_t>(static_cast<uint32_t>(code) | (bits >> 24 & 0x80));
}
KVTIER_HD inline float float_of_e5m2(uint8_t code) {
    const float size = float_of((code & 0x7Fu) << 21) * float_of(0x77800000);  // 2^112
    return float_of(bits_of(size) | (code & 0x80u) << 24);
}

// nvfp4 and mxfp4: a code is a float of 4 bits, e2m1: sign, and 0, 1, 2, 3, 4, 6, 8 or 12 steps.
inline constexpr float kSmallMost = 12.0F;
KVTIER_HD inline uint8_t e2m1_of(float value, float inverse) {
    const uint32_t bits = bits_of(value);
    const float size = float_of(bits & 0x7FFFFFFF) * inverse;
    // The codes are a concave function of the sizes: of three lines, the lowest one counts. Floats
    // that are not negative have the order of their bits, which compilers compare without branches.
    const uint32_t all = bits_of(size), half = bits_of(size * 0.5F + 2.0F);
    const uint32_t quarter = bits_of(size * 0.25F + 4.0F), seven = bits_of(7.0F);
    const uint32_t one = all < half ? all : half, other = quarter < seven ? quarter : seven;
    // Rounds to the nearest, ties to even.
    const float found = float_of(one < other ? one : other) + 8388608.0F;
    return static_cast<uint8_t>((bits_of(found) & 7) | (bits >> 28 & 8));
}
KVTIER_HD inline float float_of_e2m1(uint8_t code) {
    const int32_t n = code & 7, over4 = (n - 4) & ~((n - 4) >> 31);
    const int32_t over6 = (n - 6) & ~((n - 6) >> 31), size = n + over4 + 2 * over6;
    return static_cast<float>(size * (1 - (code >> 2 & 2)));
}

// The steps of a group whose largest magnitude is `most`. Of nvfp4 a byte is a float, e4m3, times
// the scale of the part; of mxfp4 a power of two.
KVTIER_HD inline float part_scale_of(float most) {
    const float scale = most / (kFloatMost * 6.0F), least = float_of(0x0D800000);  // 2^-100
    return scale < least ? least : scale;
}
KVTIER_HD inline float part_inverse_of(float scale) { return 1.0F / (scale * 6.0F); }
KVTIER_HD inline float nvfp4_step(uint8_t byte, float scale) {
    return float_of_e4m3(byte) * 0.5F * scale;
}
KVTIER_HD inline uint8_t nvfp4_byte(float most, float part_inverse) {
    return e4m3_of(most * part_inverse);
}
KVTIER_HD inline float mxfp4_step(uint8_t byte) {
    const uint32_t power = byte < 1 ? 0 : byte > 254 ? 253 : byte - 1u;
    return float_of(power << 23);
}
// The smallest power of two of which `most` is at most 7: 7 is as far from 6 as 5 is from 4 and 6.
KVTIER_HD inline uint8_t mxfp4_byte(float most) {
    const auto power = static_cast<int32_t>((bits_of(most) + 0x1FFFFF) >> 23) - 2;
    return static_cast<uint8_t>(power < 2 ? 2 : power);
}

// False if a part with this largest magnitude contains NaN or infinity, or could be decoded to one.
KVTIER_HD inline bool small_fits(unsigned said, uint32_t largest_bits, float most) {
    const float largest = float_of(largest_bits);
    if (!(most <= largest)) return false;
    const float step =
        said == kNvfp4Bits ? nvfp4_step(0x7E, part_scale_of(most)) : mxfp4_step(mxfp4_byte(most));
    return step * kSmallMost <= largest;
}
KVTIER_HD inline bool part_scale_fits(uint32_t largest_bits, float scale) {
    return scale >= 0 && nvfp4_step(0x7E, scale) * kSmallMost <= float_of(largest_bits);
}

// The number of equal groups of at most `most` channels in a head; the last one may be smaller.
KVTIER_HD inline size_t groups_of(size_t head, size_t most) { return (head + most - 1) / most; }
KVTIER_HD inline size_t group_of(size_t head, size_t most) {
    return (head + groups_of(head, most) - 1) / groups_of(head, most);
}

}  // namespace kvtier::codec
