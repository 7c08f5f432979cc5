// Frames as kvtier/codec/frame.py draws them: what a header needs that only the payload can tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/codec.h"
#include "codec/recipe.h"

namespace kvtier {

// Fills in the digests of a header's entries, of its payload and of the block, and last the
// header's own. Writes the payload's digest to `digest` as well. False, and nothing is written,
// where the header is none of ours or an entry lies outside the payload.
bool seal_frame(uint8_t* header, size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                uint8_t* digest);

// Encodes a block by its header, whose entries say what its parts are, to `into`, which has room
// for the bound of the block. Fills in how it is stored: the header's codec and lengths, the
// entries, and the block's digest where the header has none; `seal_frame` does the rest. Returns
// the payload's bytes: as many as the block's, and nothing of it is to be used, where no part
// shrinks. 0, and nothing is written, where the header is none of this block.
size_t encode_frame(codec::Codec codec, codec::Element element, uint8_t* header,
                    size_t header_bytes, const uint8_t* block, size_t block_bytes, uint8_t* into);

// The same by a lossy codec; there are grids for all parts or for none. The frame is of what comes
// back, so decoding it is part of this, and the block's digest is of that. A block that is not what
// its header's digest says is not encoded: it would be sound then.
size_t encode_frame(const codec::Recipe& by, codec::Element element, uint8_t* header,
                    size_t header_bytes, const uint8_t* block, size_t block_bytes,
                    std::span<const codec::Grid> grids, uint32_t position, uint8_t* into);

// The codec that a header says, which nobody has checked.
uint16_t frame_codec(const uint8_t* header);

// Checks a frame, of whose payload this is the digest, and writes its block, of so many bytes. The
// header is as before when it returns. False where the frame is damaged, of another block, or of a
// lossy codec that is not the one that is given, if any; then what lies in `block` means nothing.
bool decode_frame(const codec::Recipe* lossy, codec::Element element, uint8_t* header,
                  size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                  const uint8_t* digest, uint8_t* block, size_t block_bytes);

}  // namespace kvtier
