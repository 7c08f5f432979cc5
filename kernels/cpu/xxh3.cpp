// XXH3-128: the algorithms for short inputs, the portable stripes, and the final digest of the
// accumulators.
#include "xxh3.h"

#include <algorithm>
#include <bit>

#include "copy.h"
#include "cpu.h"

static_assert(std::endian::native == std::endian::little, "kvtier's formats are little endian");

namespace kvtier {

alignas(64) const uint8_t kXxh3Secret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

namespace {

constexpr uint64_t kP32First = kPrime32First, kP32Second = 0x85EBCA77u, kP32Third = 0xC2B2AE3Du;
constexpr uint64_t kP64First = 0x9E3779B185EBCA87ull, kP64Second = 0xC2B2AE3D27D4EB4Full;
constexpr uint64_t kP64Third = 0x165667B19E3779F9ull, kP64Fourth = 0x85EBCA77C2B2AE63ull;
constexpr uint64_t kP64Fifth = 0x27D4EB2F165667C5ull;
constexpr uint64_t kMixFirst = 0x165667919E3779F9ull, kMixSecond = 0x9FB21C651E98DF25ull;

constexpr size_t kSecretLeast = 136;  // the shortest secret that the algorithm allows

constexpr Accumulators kStart = {
    {kP32Third, kP64First, kP64Second, kP64Third, kP64Fourth, kP32Second, kP64Fifth, kP32First}};

struct Wide {
    uint64_t low, high;
};

inline uint32_t read32(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

inline uint64_t read64(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

inline Wide product(uint64_t a, uint64_t b) {
    const unsigned __int128 p = static_cast<unsigned __int128>(a) * b;
    return {static_cast<uint64_t>(p), static_cast<uint64_t>(p >> 64)};
}

inline uint64_t folded(uint64_t a, uint64_t b) {
    const Wide p = product(a, b);
    return p.low ^ p.high;
}

inline uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= kMixFirst;
    return h ^ (h >> 32);
}

inline uint64_t avalanche64(uint64_t h) {
    h ^= h >> 33;
    h *= kP64Second;
    h ^= h >> 29;
    h *= kP64Third;
    return h ^ (h >> 32);
}

inline uint64_t mix16(const uint8_t* in, const uint8_t* secret, uint64_t seed) {
    return folded(read64(in) ^ (read64(secret) + seed),
                  read64(in + 8) ^ (read64(secret + 8) - seed));
}

inline void mix32(Wide& acc, const uint8_t* first, const uint8_t* second, const uint8_t* secret,
                  uint64_t seed) {
    acc.low += mix16(first, secret, seed);
    acc.low ^= read64(second) + read64(second + 8);
    acc.high += mix16(second, secret + 16, seed);
    acc.high ^= read64(first) + read64(first + 8);
}

Wide up_to_16(const uint8_t* in, size_t n, uint64_t seed) {
    const uint8_t* s = kXxh3Secret;
    if (n == 0) {
        return {avalanche64(seed ^ read64(s + 64) ^ read64(s + 72)),
                avalanche64(seed ^ read64(s + 80) ^ read64(s + 88))};
    }
    if (n <= 3) {
        const uint32_t low = (uint32_t{in[0]} << 16) | (uint32_t{in[n >> 1]} << 24) |
                             uint32_t{in[n - 1]} | (static_cast<uint32_t>(n) << 8);
        const uint32_t high = std::rotl(__builtin_bswap32(low), 13);
        const uint64_t flip_low = uint64_t{read32(s) ^ read32(s + 4)} + seed;
        const uint64_t flip_high = uint64_t{read32(s + 8) ^ read32(s + 12)} - seed;
        return {avalanche64(low ^ flip_low), avalanche64(high ^ flip_high)};
    }
    if (n <= 8) {
        seed ^= uint64_t{__builtin_bswap32(static_cast<uint32_t>(seed))} << 32;
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
    m.low ^= __builtin_bswap64(m.high);
    Wide h = product(m.low, kP64Second);
    h.high += m.high * kP64Second;
    return {avalanche(h.low), avalanche(h.high)};
}

Wide up_to_240(const uint8_t* in, size_t n, uint64_t seed) {
    const uint8_t* s = kXxh3Secret;
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

inline void write_digest(Wide h, uint8_t* digest) {
    const uint64_t high = __builtin_bswap64(h.high), low = __builtin_bswap64(h.low);
    std::memcpy(digest, &high, 8);
    std::memcpy(digest + 8, &low, 8);
}

inline void take_stripe(Accumulators& acc, const uint8_t* in, const uint8_t* secret) {
    for (size_t i = 0; i < 8; i++) {
        const uint64_t value = read64(in + 8 * i);
        const uint64_t keyed = value ^ read64(secret + 8 * i);
        acc.lane[i ^ 1] += value;
        acc.lane[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

inline void scramble(Accumulators& acc, const uint8_t* secret) {
    for (size_t i = 0; i < 8; i++) {
        uint64_t v = acc.lane[i];
        v ^= v >> 47;
        v ^= read64(secret + kSecretBytes - kStripe + 8 * i);
        acc.lane[i] = v * kP32First;
    }
}

uint64_t merge(const Accumulators& acc, const uint8_t* secret, uint64_t start) {
    uint64_t sum = start;
    for (size_t i = 0; i < 8; i += 2) {
        sum += folded(acc.lane[i] ^ read64(secret + 8 * i),
                      acc.lane[i + 1] ^ read64(secret + 8 * i + 8));
    }
    return avalanche(sum);
}

// Consumes the last 64 bytes again, with their own part of the secret.
Wide close(Accumulators acc, const uint8_t* last, uint64_t total, const uint8_t* secret) {
    take_stripe(acc, last, secret + kSecretBytes - kStripe - 7);
    return {merge(acc, secret + 11, total * kP64First),
            merge(acc, secret + kSecretBytes - kStripe - 11, ~(total * kP64Second))};
}

size_t take_scalar(Accumulators& acc, const uint8_t* src, size_t stripes, size_t position,
                   const uint8_t* secret) {
    for (size_t k = 0; k < stripes; k++) {
        take_stripe(acc, src + kStripe * k, secret + 8 * position);
        if (++position == kStripesPerRun) {
            scramble(acc, secret);
            position = 0;
        }
    }
    return position;
}

size_t take_and_copy_scalar(Accumulators& acc, uint8_t* dst, const uint8_t* src, size_t lead,
                            size_t stripes, size_t position, const uint8_t* secret,
                            const uint8_t*) {
    for (size_t k = 0; k < stripes;) {
        // One run at a time: it is in the L1 cache when the copy reads it again.
        const size_t n = std::min(stripes - k, kStripesPerRun);
        position = take_scalar(acc, src + kStripe * k, n, position, secret);
        std::memcpy(dst + lead + kStripe * k, src + lead + kStripe * k, kStripe * n);
        k += n;
    }
    return position;
}

constexpr StripeKernels kScalarKernels = {take_scalar, take_and_copy_scalar};

const StripeKernels& stripe_kernels(Level level) {
#if KVTIER_X86
    if (level == Level::kAvx512) return kStripesAvx512;
    if (level == Level::kAvx2) return kStripesAvx2;
#endif
    return kScalarKernels;
}

}  // namespace

const StripeKernels& stripe_kernels_for_copy() { return stripe_kernels(copy_choice().level()); }
const StripeKernels& stripe_kernels_for_hash() { return stripe_kernels(xxh3_choice().level()); }

void xxh3_128(const uint8_t* data, size_t size, uint64_t seed, uint8_t* digest) {
    if (size <= 16) return write_digest(up_to_16(data, size, seed), digest);
    if (size <= kShortMost) return write_digest(up_to_240(data, size, seed), digest);
    alignas(64) uint8_t seeded[kSecretBytes];
    const uint8_t* secret = kXxh3Secret;
    if (seed != 0) {
        for (size_t i = 0; i < kSecretBytes; i += 16) {
            const uint64_t low = read64(secret + i) + seed, high = read64(secret + i + 8) - seed;
            std::memcpy(seeded + i, &low, 8);
            std::memcpy(seeded + i + 8, &high, 8);
        }
        secret = seeded;
    }
    Accumulators acc = kStart;
    stripe_kernels_for_hash().take(acc, data, (size - 1) / kStripe, 0, secret);
    write_digest(close(acc, data + size - kStripe, size, secret), digest);
}

DigestedCopy::DigestedCopy(uint64_t total, bool streaming)
    : acc_(kStart),
      kernels_(stripe_kernels_for_copy()),
      total_(total),
      left_(total == 0 ? 0 : (total - 1) / kStripe),
      streaming_(streaming) {}

void DigestedCopy::stripes(uint8_t* dst, const uint8_t* src, size_t count, const uint8_t* next) {
    // Below this, the head and tail of a piece cost more than streaming its middle saves.
    constexpr size_t kFewest = 8;
    const size_t lead = (0 - reinterpret_cast<uintptr_t>(dst)) & (kLine - 1);
    if (dst == nullptr || !streaming_ || count < kFewest) {
        position_ = kernels_.take(acc_, src, count, position_, kXxh3Secret);
        if (dst != nullptr) std::memcpy(dst, src, kStripe * count);
    } else if (lead == 0) {
        const size_t last = next == nullptr ? 0 : std::min(count, kAhead / kStripe);
        const size_t first = count - last, at = kStripe * first;
        position_ = kernels_.take_and_stream(acc_, dst, src, 0, first, position_, kXxh3Secret,
                                             next == nullptr ? nullptr : src + kAhead);
        position_ = kernels_.take_and_stream(acc_, dst + at, src + at, 0, last, position_,
                                             kXxh3Secret, next);
    } else {
        // The last stripe has no whole line of its own: its first part completes one, its rest is a
        // tail.
        std::memcpy(dst, src, lead);
        position_ = kernels_.take_and_stream(acc_, dst, src, lead, count - 1, position_,
                                             kXxh3Secret, nullptr);
        const size_t done = kStripe * (count - 1);
        position_ = kernels_.take(acc_, src + done, 1, position_, kXxh3Secret);
        std::memcpy(dst + lead + done, src + lead + done, kStripe - lead);
    }
}

void DigestedCopy::add(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* next) {
    if (n == 0) return;
    if (total_ <= kShortMost) {
        std::memcpy(small_ + kept_, src, n);
        if (dst != nullptr) std::memcpy(dst, src, n);
        kept_ += n;
        return;
    }
    take(dst, src, n, next);
    // Read last: reading the end of a piece first would be a cache miss that everything waits for.
    if (n >= kStripe) {
        std::memcpy(last_, src + n - kStripe, kStripe);
    } else {
        std::memmove(last_, last_ + n, kStripe - n);
        std::memcpy(last_ + kStripe - n, src, n);
    }
}

void DigestedCopy::take(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* next) {
    if (carried_ != 0) {
        const size_t part = std::min(kStripe - carried_, n);
        std::memcpy(carry_ + carried_, src, part);
        if (dst != nullptr) std::memcpy(dst, src, part), dst += part;
        carried_ += part, src += part, n -= part;
        if (carried_ < kStripe) return;
        carried_ = 0;
        if (left_ > 0) {
            position_ = kernels_.take(acc_, carry_, 1, position_, kXxh3Secret);
            left_--;
        }
    }
    const size_t count = static_cast<size_t>(std::min<uint64_t>(n / kStripe, left_));
    if (count != 0) {
        stripes(dst, src, count, next);
        left_ -= count;
        if (dst != nullptr) dst += kStripe * count;
        src += kStripe * count, n -= kStripe * count;
    }
    if (n != 0) {
        // The rest is less than a stripe, or the whole last stripe, which is consumed from last_.
        std::memcpy(carry_, src, n);
        if (dst != nullptr) std::memcpy(dst, src, n);
        carried_ = n % kStripe;
    }
}

void DigestedCopy::finish(uint8_t* digest) const {
    if (total_ <= kShortMost) return xxh3_128(small_, kept_, 0, digest);
    write_digest(close(acc_, last_, total_, kXxh3Secret), digest);
}

}  // namespace kvtier
