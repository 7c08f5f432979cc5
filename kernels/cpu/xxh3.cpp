// XXH3-128: the portable stripes, digests of whole inputs, and digests of pieces that are copied.
#include "xxh3.h"

#include <algorithm>
#include <bit>

#include "copy.h"
#include "cpu.h"

static_assert(std::endian::native == std::endian::little, "kvtier's formats are little endian");

namespace kvtier {

alignas(64) const uint8_t kXxh3Secret[kSecretBytes] = KVTIER_XXH3_SECRET;

namespace {

using xxh3::Wide, xxh3::read64, xxh3::up_to_16, xxh3::up_to_240, xxh3::write_digest;

constexpr Accumulators kStart = {KVTIER_XXH3_STARTS};

inline void take_stripe(Accumulators& acc, const uint8_t* in, const uint8_t* secret) {
    for (size_t i = 0; i < 8; i++) {
        const uint64_t value = read64(in + 8 * i);
        acc.lane[i ^ 1] += value;
        acc.lane[i] += xxh3::keyed_product(value, read64(secret + 8 * i));
    }
}

inline void scramble(Accumulators& acc, const uint8_t* secret) {
    for (size_t i = 0; i < 8; i++) {
        acc.lane[i] = xxh3::scrambled(acc.lane[i], read64(secret + kSecretBytes - kStripe + 8 * i));
    }
}

uint64_t merge(const Accumulators& acc, const uint8_t* secret, uint64_t start) {
    uint64_t sum = start;
    for (size_t i = 0; i < 8; i += 2) {
        sum += xxh3::mixed_pair(acc.lane[i], acc.lane[i + 1], secret + 8 * i);
    }
    return xxh3::avalanche(sum);
}

// Consumes the last 64 bytes again, with their own part of the secret.
Wide close(Accumulators acc, const uint8_t* last, uint64_t total, const uint8_t* secret) {
    take_stripe(acc, last, secret + kSecretBytes - kStripe - 7);
    return {merge(acc, secret + xxh3::kLowAt, xxh3::low_start(total)),
            merge(acc, secret + xxh3::kHighAt, xxh3::high_start(total))};
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
    if (size <= 16) return write_digest(up_to_16(data, size, seed, kXxh3Secret), digest);
    if (size <= kShortMost) return write_digest(up_to_240(data, size, seed, kXxh3Secret), digest);
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
        for (size_t done = 0; done < first; done += kPageLines) {
            const size_t some = std::min(first - done, kPageLines), here = kStripe * done;
            prefetch_pages(dst + here + kPagesAhead, kStripe * some);
            position_ = kernels_.take_and_stream(acc_, dst + here, src + here, 0, some, position_,
                                                 kXxh3Secret,
                                                 next == nullptr ? nullptr : src + here + kAhead);
        }
        position_ = kernels_.take_and_stream(acc_, dst + at, src + at, 0, last, position_,
                                             kXxh3Secret, next);
    } else {
        // The last stripe has no whole line: its first part completes one, its rest is a tail.
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

LentDigest DigestedCopy::lend(uint8_t* dst, size_t most) {
    const size_t lines = static_cast<size_t>(std::min<uint64_t>(most, left_)) / 2 * 2;
    const bool aligned = reinterpret_cast<uintptr_t>(dst) % kLine == 0;
    if (carried_ != 0 || position_ % 2 != 0 || total_ <= kShortMost || (streaming_ && !aligned)) {
        return {};
    }
    const LentDigest lent = {lines, dst, &acc_, position_, last_, streaming_};
    position_ = (position_ + lines) % kStripesPerRun, left_ -= lines;
    return lent;
}

void DigestedCopy::finish(uint8_t* digest) const {
    if (total_ <= kShortMost) return xxh3_128(small_, kept_, 0, digest);
    write_digest(close(acc_, last_, total_, kXxh3Secret), digest);
}

}  // namespace kvtier
