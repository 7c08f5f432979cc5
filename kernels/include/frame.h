// Frames as kvtier_daemon/codec/frame.py describes them: fills in the parts of a header that depend
// on the payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/recipe.h"
#include "xxh3.h"

namespace kvtier {

// Fills in the digests in a header: of its entries, of its payload, of the block, and finally of
// the header itself. Also writes the payload's digest to `digest`. Returns false and writes nothing
// if the header is not a kvtier header or an entry lies outside the payload.
bool seal_frame(uint8_t* header, size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                uint8_t* digest);

// Encodes a block to `into`, which has room for the block's bound. The entries of the header
// describe the parts of the block. Fills in how it is stored: the header's codec and lengths, the
// entries, and the block's digest unless the header has one; `seal_frame` does the rest. Returns
// the bytes of the payload. If no part shrinks, this is the size of the block, and the caller must
// not use `into`. Returns 0 and writes nothing if the header does not describe this block.
size_t encode_frame(codec::Codec codec, codec::Element element, uint8_t* header,
                    size_t header_bytes, const uint8_t* block, size_t block_bytes, uint8_t* into);

// Encodes with a lossy codec; there are grids for all parts or for none. The frame describes the
// decoded block, so this decodes it too, and the block's digest is that of the result. A block that
// does not match the digest in its header is not encoded, because its frame would look valid.
size_t encode_frame(const codec::Recipe& by, codec::Element element, uint8_t* header,
                    size_t header_bytes, const uint8_t* block, size_t block_bytes,
                    std::span<const codec::Grid> grids, uint32_t position, uint8_t* into);

// The codec that a header names, unchecked.
uint16_t frame_codec(const uint8_t* header);

// Parts in sequence that are decoded together; whole pages if the codec reorders pages.
struct FrameRun {
    size_t first, count, bytes;
};

// Checks a frame and decodes it into its block, at once or while it arrives from a disk. Its
// arguments must stay valid until it is done. Not thread-safe.
class FrameDecoder {
 public:
    // `digest` is the payload's; `block` has room for everything that the frame decodes to. `lossy`
    // is the recipe of the only lossy codec that the frame may have, or null.
    FrameDecoder(const codec::Recipe* lossy, codec::Element element, uint8_t* header,
                 size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                 const uint8_t* digest, uint8_t* block, size_t block_bytes);

    // Reports that the header and `arrived` bytes of the payload have arrived, and decodes what is
    // complete. Returns false if the frame is damaged, belongs to another block, or has another
    // lossy codec than the given one; then the content of the block is undefined, and the caller
    // must not call again. Also returns false until the whole payload has arrived. Restores the
    // header.
    bool take(size_t arrived);

 private:
    bool open();
    const codec::Order* order() const;
    bool decode(const FrameRun& run);

    const codec::Recipe* lossy_;
    const codec::Element element_;
    uint8_t* const header_;
    const size_t header_bytes_;
    const uint8_t* const payload_;
    const size_t payload_bytes_;
    const uint8_t* const digest_;
    uint8_t* block_;        // where the next run is written
    const bool streaming_;  // bypasses the caches
    const size_t block_bytes_;
    bool opened_ = false;
    std::vector<codec::Decoded> parts_;
    std::vector<FrameRun> runs_;
    size_t next_ = 0;     // bytes of the payload that have arrived
    size_t arrived_ = 0;  // bytes of the payload that have arrived
    DigestedCopy payload_digest_, block_digest_;
};

}  // namespace kvtier
