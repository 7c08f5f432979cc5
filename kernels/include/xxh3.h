// XXH3 with 128 bits, as of xxHash 0.8, divided into steps that a copy can include.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/digest.h"

namespace kvtier {

extern const uint8_t kXxh3Secret[kSecretBytes];

struct alignas(64) Accumulators {
    uint64_t lane[8];
};

// The functions of an implementation. `position` is the number of stripes since the last scramble;
// the new one is returned. Lines have 64 bytes; a streaming store never leaves a line half written.
struct StripeKernels {
    // Consumes `stripes` stripes of `src`.
    size_t (*take)(Accumulators& acc, const uint8_t* src, size_t stripes, size_t position,
                   const uint8_t* secret);
    // The same, and streams `stripes` lines: src[lead..] to dst[lead..], where dst + lead is
    // line-aligned. Reads lead bytes after the last stripe. If `ahead` is not null and lead is 0,
    // prefetches the line there, which advances with each stripe.
    size_t (*take_and_stream)(Accumulators& acc, uint8_t* dst, const uint8_t* src, size_t lead,
                              size_t stripes, size_t position, const uint8_t* secret,
                              const uint8_t* ahead);
};

const StripeKernels& stripe_kernels_for_copy();  // the implementation chosen for "copy"
const StripeKernels& stripe_kernels_for_hash();  // the implementation chosen for "xxh3"

// Writes the digest of `size` bytes in canonical (big-endian) order.
void xxh3_128(const uint8_t* data, size_t size, uint64_t seed, uint8_t* digest);

// The state of a DigestedCopy, for code that writes and digests the next lines itself.
struct LentDigest {
    size_t lines = 0;  // how many
    uint8_t* to = nullptr;
    Accumulators* acc = nullptr;
    size_t position = 0;
    uint8_t* last = nullptr;  // gets the last line, too
    bool streaming = false;   // the lines bypass the caches; then `to` is line-aligned
};

// A digest of bytes that arrive in pieces while they are copied. The total must be known in
// advance, because XXH3 treats the last stripe differently.
class DigestedCopy {
 public:
    // With `streaming`, whole lines bypass the caches, and the caller issues the fence.
    DigestedCopy(uint64_t total, bool streaming);

    // Digests the next n bytes, and copies them from src to dst unless dst is null. `next` as for
    // stream_copy.
    void add(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* next = nullptr);
    // Lets the caller write up to `most` whole lines to dst, and digest them: an even number of
    // lines from an even position on, or none.
    LentDigest lend(uint8_t* dst, size_t most);
    // Writes the digest; exactly `total` bytes must have been added.
    void finish(uint8_t* digest) const;

 private:
    void take(uint8_t* dst, const uint8_t* src, size_t n, const uint8_t* next);
    void stripes(uint8_t* dst, const uint8_t* src, size_t count, const uint8_t* next);

    Accumulators acc_;
    const StripeKernels& kernels_;
    uint64_t total_;
    uint64_t left_;  // stripes still to consume, without the very last one
    size_t position_ = 0;
    size_t carried_ = 0;  // bytes in carry_: a stripe that began in an earlier piece
    size_t kept_ = 0;     // bytes in small_, for totals without stripes
    bool streaming_;
    uint8_t carry_[kStripe];
    uint8_t last_[kStripe];  // the last 64 bytes
    uint8_t small_[kShortMost];
};

}  // namespace kvtier
