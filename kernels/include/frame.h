// Frames as kvtier/codec/frame.py draws them: what a header needs that only the payload can tell.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

// Fills in the digests of a header's entries, of its payload and of the block, and last the
// header's own. Writes the payload's digest to `digest` as well. False, and nothing is written,
// where the header is none of ours or an entry lies outside the payload.
bool seal_frame(uint8_t* header, size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                uint8_t* digest);

}  // namespace kvtier
