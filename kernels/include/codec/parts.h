// What the codecs' files share: how numbers and whole pieces are written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "codec/codec.h"
#include "copy.h"

namespace kvtier::codec {

inline uint32_t get32(const uint8_t* at) {
    return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8 |
           static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[3]) << 24;
}

inline void put32(uint8_t* at, size_t value) {
    for (int i = 0; i < 4; i++) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

// What is more than the nearer caches hold goes past all of them: it would only push out what lies
// there, and lines that are to be written over are not read first.
inline constexpr size_t kPast = size_t{1} << 20;

// Asks for the pages that begin in these bytes, a line of each: a store past the caches that has
// yet to learn where its page lies holds up all that follow. (Pages of 4 KiB in a virtual machine:
// what is decoded is worth a fifth more.) Asking touches nothing, wherever it is.
inline constexpr size_t kPage = 4096, kPagesAhead = 2 * kPage;
inline void ask_pages(const uint8_t* at, size_t nbytes) {
    for (size_t page = (0 - reinterpret_cast<uintptr_t>(at)) % kPage; page < nbytes;
         page += kPage) {
        __builtin_prefetch(at + page);
    }
}

inline void put_bytes(uint8_t* to, const void* from, size_t nbytes, bool past) {
    if (past) return stream_copy(to, static_cast<const uint8_t*>(from), nbytes);
    std::memcpy(to, from, nbytes);
}

inline size_t keep_raw(Encoded& part, uint8_t* out) {
    std::memcpy(out, part.raw, part.raw_bytes);
    part.codec = Codec::kRaw;
    part.bytes = part.raw_bytes;
    return part.bytes;
}

// Where the bytes lie that are needed so many parts later: asked for while this part is encoded.
// Where rows of it are counted those lie apart, so each of them would be waited for.
inline const uint8_t* ahead(std::span<const Encoded> parts, size_t i, size_t later) {
    const bool alike = i + later < parts.size() && parts[i + later].raw_bytes >= parts[i].raw_bytes;
    return parts[alike ? i + later : i].raw;
}

// Moves all streams to their ends: side by side for as long as each has rows, then what is left of
// each.
template <typename Stream, typename Advance>
void advance(Advance by, Stream* const* streams, const size_t* rows, size_t count) {
    size_t done = 0;
    if (count == 4 || count == 2) {
        done = *std::min_element(rows, rows + count);
        by(streams, count, done);
    }
    for (size_t i = 0; i < count; i++) {
        if (rows[i] != done) by(streams + i, 1, rows[i] - done);
    }
}

// The encoded size, or kNoRoom where that would not be less than the part's, or not be possible.
size_t encode_quantized(Codec codec, Element is, const Encoded& part, bool past, uint8_t* out);
// False if the part is damaged.
bool decode_quantized(Element is, const Decoded& part, bool past);

// Writes the parts one after the other; returns where they end.
uint8_t* encode_calibrated(Codec codec, Element is, std::span<Encoded> parts, bool past,
                           uint8_t* out);

// Reads parts of the calibrated codecs, whose streams come out side by side. Keeps the list's parts
// until they are flushed.
class CalibratedReader {
 public:
    CalibratedReader(Element is, bool past) : is_(is), past_(past) {}

    // False if this part, or one before it, is damaged: `failed` says which.
    bool add(const Decoded& part, size_t number);
    bool flush();
    size_t failed() const { return failed_; }

 private:
    struct Kept;

    bool fail(size_t number);

    Element is_;
    bool past_;
    Kept* kept_ = nullptr;
    size_t waiting_ = 0;
    size_t failed_ = 0;
};

}  // namespace kvtier::codec
