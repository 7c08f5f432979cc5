// The arithmetic of XXH3-128 (the published algorithm of xxHash 0.8), for every compiler: the CPU's
// kernels are compiled from it, and a GPU's kernel includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/lossless.h"

// 192 bytes. A macro, because a device needs tables in its own memory.
// clang-format off
#define KVTIER_XXH3_SECRET { \
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, \
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, \
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, \
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, \
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, \
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, \
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, \
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, \
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, \
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, \
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, \
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e}
// clang-format on

namespace kvtier {

inline constexpr size_t kStripe = 64;         // bytes per step
inline constexpr size_t kStripesPerRun = 16;  // stripes between two scrambles
inline constexpr size_t kSecretBytes = 192;
inline constexpr size_t kDigestBytes = 16;
// up to this size another algorithm without stripes applies
inline constexpr size_t kShortMost = 240;

inline constexpr uint64_t kPrime32First = 0x9E3779B1u;

namespace xxh3 {

inline constexpr uint64_t kP32First = kPrime32First, kP32Second = 0x85EBCA77u,
                          kP32Third = 0xC2B2AE3Du;
inline constexpr uint64_t kP64First = 0x9E3779B185EBCA87ull, kP64Second = 0xC2B2AE3D27D4EB4Full;
inline constexpr uint64_t kP64Third = 0x165667B19E3779F9ull, kP64Fourth = 0x85EBCA77C2B2AE63ull;
inline constexpr uint64_t kP64Fifth = 0x27D4EB2F165667C5ull;
inline constexpr uint64_t kMixFirst = 0x165667919E3779F9ull, kMixSecond = 0x9FB21C651E98DF25ull;

inline constexpr size_t kSecretLeast = 136;  // the shortest secret that the algorithm allows

// The first values of the eight accumulators.
#define KVTIER_XXH3_STARTS                                                        \
    {kvtier::xxh3::kP32Third, kvtier::xxh3::kP64First,  kvtier::xxh3::kP64Second, \
     kvtier::xxh3::kP64Third, kvtier::xxh3::kP64Fourth, kvtier::xxh3::kP32Second, \
     kvtier::xxh3::kP64Fifth, kvtier::xxh3::kP32First}

struct Wide {
    uint64_t low, high;
};

KVTIER_HD inline uint32_t read32(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

KVTIER_HD inline uint64_t read64(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

KVTIER_HD inline uint32_t swapped(uint32_t v) {
    return v << 24 | (v & 0xFF00u) << 8 | (v >> 8 & 0xFF00u) | v >> 24;
}
KVTIER_HD inline uint64_t swapped(uint64_t v) {
    return uint64_t{swapped(static_cast<uint32_t>(v))} << 32 |
           swapped(static_cast<uint32_t>(v >> 32));
}

KVTIER_HD inline Wide product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return {a * b, __umul64hi(a, b)};
#else
    const unsigned __int128 p = static_cast<unsigned __int128>(a) * b;
    return {static_cast<uint64_t>(p), static_cast<uint64_t>(p >> 64)};
#endif
}

KVTIER_HD inline uint64_t folded(uint64_t a, uint64_t b) {
    const Wide p = product(a, b);
    return p.low ^ p.high;
}

KVTIER_HD inline uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= kMixFirst;
    return h ^ (h >> 32);
}

KVTIER_HD inline uint64_t avalanche64(uint64_t h) {
    h ^= h >> 33;
    h *= kP64Second;
    h ^= h >> 29;
    h *= kP64Third;
    return h ^ (h >> 32);
}

KVTIER_HD inline uint64_t mix16(const uint8_t* in, const uint8_t* secret, uint64_t seed) {
    return folded(read64(in) ^ (read64(secret) + seed),
                  read64(in + 8) ^ (read64(secret + 8) - seed));
}

KVTIER_HD inline void mix32(Wide& acc, const uint8_t* first, const uint8_t* second,
                            const uint8_t* secret, uint64_t seed) {
    acc.low += mix16(first, secret, seed);
    acc.low ^= read64(second) + read64(second + 8);
    acc.high += mix16(second, secret + 16, seed);
    acc.high ^= read64(first) + read64(first + 8);
}

KVTIER_HD inline Wide up_to_16(const uint8_t* in, size_t n, uint64_t seed, const uint8_t* s) {
    if (n == 0) {
        return {avalanche64(seed ^ read64(s + 64) ^ read64(s + 72)),
                avalanche64(seed ^ read64(s + 80) ^ read64(s + 88))};
    }
    if (n <= 3) {
        const uint32_t low = (uint32_t{in[0]} << 16) | (uint32_t{in[n >> 1]} << 24) |
                             uint32_t{in[n - 1]} | (static_cast<uint32_t>(n) << 8);
        const uint32_t high = (swapped(low) << 13 | swapped(low) >> 19);
        const uint64_t flip_low = uint64_t{read32(s) ^ read32(s + 4)} + seed;
        const uint64_t flip_high = uint64_t{read32(s + 8) ^ read32(s + 12)} - seed;
        return {avalanche64(low ^ flip_low), avalanche64(high ^ flip_high)};
    }
    if (n <= 8) {
        seed ^= uint64_t{swapped(static_cast<uint32_t>(seed))} << 32;
        const uint64_t both = uint64_t{read32(in)} + (uint64_t{read32(in + n - 4)} << 32);
        const uint64_t flip = (read64(s + 16) ^ read64(s + 24)) + seed;
        Wide m = product(both ^ flip, kP64First + (n << 2));
        m.high += m.low << 1;
        m.low ^= m.high >> 3;
        m.low = (m.low ^ (m.low >> 35)) * kMixSecond;
        m.low ^= m.low >> 28;
        m.high = avalanche(m.high);
        return m;
    }
    const uint64_t flip_low = (read64(s + 32) ^ read64(s + 40)) - seed;
    const uint64_t flip_high = (read64(s + 48) ^ read64(s + 56)) + seed;
    const uint64_t low = read64(in);
    uint64_t high = read64(in + n - 8);
    Wide m = product(low ^ high ^ flip_low, kP64First);
    m.low += static_cast<uint64_t>(n - 1) << 54;
    high ^= flip_high;
    m.high += high + (high & 0xFFFFFFFFu) * (kP32Second - 1);
    m.low ^= swapped(m.high);
    Wide h = product(m.low, kP64Second);
    h.high += m.high * kP64Second;
    return {avalanche(h.low), avalanche(h.high)};
}

KVTIER_HD inline Wide up_to_240(const uint8_t* in, size_t n, uint64_t seed, const uint8_t* s) {
    Wide acc = {n * kP64First, 0};
    if (n <= 128) {
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            mix32(acc, in + 16 * i, in + n - 16 * (i + 1), s + 32 * i, seed);
        }
    } else {
        for (size_t i = 0; i < 128; i += 32) mix32(acc, in + i, in + i + 16, s + i, seed);
        acc = {avalanche(acc.low), avalanche(acc.high)};
        for (size_t i = 128; i + 32 <= n; i += 32) {
            mix32(acc, in + i, in + i + 16, s + 3 + i - 128, seed);
        }
        mix32(acc, in + n - 16, in + n - 32, s + kSecretLeast - 17 - 16, 0 - seed);
    }
    const uint64_t high = acc.low * kP64First + acc.high * kP64Fourth + (n - seed) * kP64Second;
    return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

// One of the eight accumulators after 16 stripes; `key`: its part of the end of the secret.
KVTIER_HD inline uint64_t scrambled(uint64_t v, uint64_t key) {
    return (v ^ v >> 47 ^ key) * kP32First;
}

// What a word of a stripe adds to its accumulator; the word itself is added to the neighbour.
KVTIER_HD inline uint64_t keyed_product(uint64_t word, uint64_t key) {
    const uint64_t keyed = word ^ key;
    return (keyed & 0xFFFFFFFFu) * (keyed >> 32);
}

// The digest's two words: what is below, plus the pairs of accumulators mixed with the secret from
// this position on; then `avalanche`.
inline constexpr uint64_t kLowAt = 11, kHighAt = kSecretBytes - kStripe - 11;
KVTIER_HD inline uint64_t low_start(uint64_t total) { return total * kP64First; }
KVTIER_HD inline uint64_t high_start(uint64_t total) { return ~(total * kP64Second); }
KVTIER_HD inline uint64_t mixed_pair(uint64_t one, uint64_t other, const uint8_t* secret) {
    return folded(one ^ read64(secret), other ^ read64(secret + 8));
}

// In canonical order, highest byte first.
KVTIER_HD inline void write_digest(const Wide& h, uint8_t* digest) {
    const uint64_t high = swapped(h.high), low = swapped(h.low);
    std::memcpy(digest, &high, 8);
    std::memcpy(digest + 8, &low, 8);
}

}  // namespace xxh3
}  // namespace kvtier
