// What the codecs' files share: how numbers and whole pieces are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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

inline void put_bytes(uint8_t* to, const void* from, size_t nbytes, bool past) {
    if (past) return stream_copy(to, static_cast<const uint8_t*>(from), nbytes);
    std::memcpy(to, from, nbytes);
}

// The encoded size, or kNoRoom where that would not be less than the part's, or not be possible.
size_t encode_quantized(Codec codec, Element is, const Encoded& part, bool past, uint8_t* out);
// False if the part is damaged.
bool decode_quantized(Element is, const Decoded& part, bool past);

}  // namespace kvtier::codec
