// Shared by the files of the codecs: writing of numbers and of whole pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

// Larger results bypass the caches: else they evict other data, and their lines are read first.
inline constexpr size_t kStreamingLeast = size_t{1} << 20;

inline void put_bytes(uint8_t* to, const void* from, size_t nbytes, bool streaming) {
    if (streaming) return stream_copy(to, static_cast<const uint8_t*>(from), nbytes);
    std::memcpy(to, from, nbytes);
}

inline size_t keep_raw(Encoded& part, uint8_t* out) {
    std::memcpy(out, part.raw, part.raw_bytes);
    part.codec = Codec::kRaw;
    part.bytes = part.raw_bytes;
    return part.bytes;
}

// The address of the bytes that are needed `later` parts later; they are prefetched while this part
// is encoded. The rows that are counted are far apart, so each of them would be a cache miss.
inline const uint8_t* ahead(std::span<const Encoded> parts, size_t i, size_t later) {
    const bool alike = i + later < parts.size() && parts[i + later].raw_bytes >= parts[i].raw_bytes;
    return parts[alike ? i + later : i].raw;
}

// True if an encoder could have left these states.
inline bool begins(const Decoder& stream) {
    return std::all_of(stream.state, stream.state + kLanes,
                       [](uint32_t state) { return state >= kStateLeast && state < kStateEnd; });
}

// True if the states are those of an encoder before its first symbol.
inline bool ends(const Decoder& stream) {
    return std::all_of(stream.state, stream.state + kLanes,
                       [](uint32_t state) { return state == kStateLeast; });
}

// Advances all streams to their ends: together while all have rows, then the rest of each.
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

// Returns the encoded size, or kNoRoom if the part does not shrink or cannot be encoded.
size_t encode_quantized(Codec codec, Element is, const Encoded& part, bool streaming, uint8_t* out);
// Returns false if the part is damaged.
bool decode_quantized(Element is, const Decoded& part, bool streaming);

// Writes the parts one after another; returns the end.
uint8_t* encode_calibrated(Codec codec, Element is, std::span<Encoded> parts, bool streaming,
                           uint8_t* out);

// Decodes parts of the calibrated codecs, several streams at a time; uses them until flushed.
class CalibratedReader {
 public:
    CalibratedReader(Element is, bool streaming) : is_(is), streaming_(streaming) {}

    // Returns false if this part, or one before it, is damaged; `failed` returns which.
    bool add(const Decoded& part, size_t number);
    bool flush();
    size_t failed() const { return failed_; }

 private:
    struct Kept;

    bool fail(size_t number);

    Element is_;
    bool streaming_;
    Kept* kept_ = nullptr;
    size_t waiting_ = 0;
    size_t failed_ = 0;
};

}  // namespace kvtier::codec
