// The arithmetic of the calibrated codecs, for every compiler: the CPU's kernels are compiled from
// it, and a GPU's kernels include it. Each operation is an IEEE operation on floats. Operations
// must not be contracted, so this needs -ffp-contract=off.
//
// A part consists of tokens of heads of channels. A channel's number is its distance from its
// expected value in steps; see docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/lossless.h"
#include "codec/quantized.h"

namespace kvtier::codec {

inline constexpr size_t kStreamSymbols = kStreamRows * kRow;
inline constexpr size_t kStreamsMost = 65'535;
inline constexpr int32_t kAnchorEscape = -128;

// The positions of the numbers in an encoded part.
inline constexpr size_t kLevelAt = 1, kStreamsAt = 2, kLastAt = 4;
inline constexpr size_t kCalibratedHeader = 8;

// 2^((exponent - 160) / 8), rounded to the nearest float.
KVTIER_HD inline float step_at(uint32_t exponent) {
    constexpr uint32_t eighths[8] = {0x3F800000, 0x3F8B95C2, 0x3F9837F0, 0x3FA5FED7,
                                     0x3FB504F3, 0x3FC5672A, 0x3FD744FD, 0x3FEAC0C7};
    return float_of(eighths[exponent % 8] + ((exponent / 8 - 20) << 23));
}
// The factor that encoders multiply by; not exactly the inverse of the step.
KVTIER_HD inline float inverse_at(uint32_t exponent) { return step_at(320 - exponent); }

// --- rotation ------------------------------------------------------------------------------------

inline constexpr size_t kTurn = 1024;  // the divisions of a turn with known cosines and sines

struct Angle {
    float cos, sin;
};

// The angle of a phase, in units of 2^-64 turns: the nearest 1,024th, rotated by the rest.
KVTIER_HD inline Angle angle_of(uint64_t phase, const float* cosines, const float* sines) {
    const uint64_t nearest = (phase + (uint64_t{1} << 53)) >> 54;
    const int64_t left = static_cast<int64_t>(phase - (nearest << 54)) >> 30;
    const float t = static_cast<float>(static_cast<int32_t>(left)) * 0x1.921fb6p-32F;
    const float square = t * t;
    const float sine = t - t * (square * 0x1.555556p-3F), versine = square * 0.5F;
    const float c = cosines[nearest % kTurn], s = sines[nearest % kTurn];
    return {c - (c * versine + s * sine), s + (c * sine - s * versine)};
}

struct Pair {
    float low, high;
};
KVTIER_HD inline Pair turned_back(float low, float high, float cos, float sin) {
    return {low * cos + high * sin, high * cos - low * sin};
}
KVTIER_HD inline Pair turned_forward(float low, float high, float cos, float sin) {
    return {low * cos - high * sin, high * cos + low * sin};
}

// --- numbers -------------------------------------------------------------------------------------

KVTIER_HD inline float steps_away(float value, float expected, float inverse) {
    return (value - expected) * inverse;
}

// True if an escape can hold the nearest whole number of steps; false for NaN.
KVTIER_HD inline bool near_enough(float steps) { return steps < 32767.5F && steps > -32767.5F; }

// Nearest, ties to even: a float near 1.5 * 2^23 has no fraction. Undefined unless near_enough.
KVTIER_HD inline int16_t nearest_of(float steps) {
    return static_cast<int16_t>(bits_of(steps + 12'582'912.0F));
}

KVTIER_HD inline float value_at(int16_t number, float step, float expected) {
    return static_cast<float>(number) * step + expected;
}

// The value of an element, and whether it is a finite number: infinities of fp16 look like numbers.
template <Element kIs>
KVTIER_HD inline bool is_number(float widened) {
    return kIs != Element::kFp16 || (widened < 65536.0F && widened > -65536.0F);
}

// Limits a value to the range of the type: values of bf16 and fp32 never exceed their range.
template <Element kIs>
KVTIER_HD inline typename Value<kIs>::Bits held_in(float value) {
    if constexpr (kIs == Element::kFp16) {
        value = value > 65504.0F ? 65504.0F : value;
        value = value < -65504.0F ? -65504.0F : value;
    }
    return Value<kIs>::narrowed(value);
}

}  // namespace kvtier::codec
