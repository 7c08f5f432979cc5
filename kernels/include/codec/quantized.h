// The arithmetic of the codecs with a fixed rate, for every compiler: the CPU's kernels are
// compiled from it, and a GPU's kernels include it. A multiplication and an addition are rounded
// separately, because not every processor has a fused operation. This needs -ffp-contract=off.
//
// A part consists of rows of channels, one row per token; after `rows` rows another matrix begins
// (the next head of the engine's layout). In a group of elements, which is the tokens of one
// channel or the channels of one token, the minimum and the maximum give a base and a step, and
// each element is base + code * step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/lossless.h"

namespace kvtier::codec {

inline constexpr size_t kQuantizedTypes = 3;  // bf16, fp16, fp32
inline constexpr size_t kGroupTokens = 256;   // of one channel
// Of one token: the channels of a head, or an equal share of them.
inline constexpr size_t kGroupChannels = 64;
inline constexpr size_t kChannelsMost = size_t{1} << 16;
inline constexpr size_t kUnit = 64;  // codes that are packed together

// The positions of the numbers in an encoded part; see docs/formats.md.
inline constexpr size_t kBitsAt = 1, kByTokenAt = 2, kRowsAt = 4, kChannelsAt = 8, kHeadAt = 12;
inline constexpr size_t kQuantizedHeader = 16;

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
inline constexpr unsigned kFloating = 16;  // a flag next to the bits, in a part's header
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

// The number of equal groups in a head; the last one may be smaller.
KVTIER_HD inline size_t groups_of(size_t head) {
    return (head + kGroupChannels - 1) / kGroupChannels;
}
KVTIER_HD inline size_t group_of(size_t head) {
    return (head + groups_of(head) - 1) / groups_of(head);
}

}  // namespace kvtier::codec
