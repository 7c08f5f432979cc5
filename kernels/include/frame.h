// Frames as kvtier/codec/frame.py draws them: what a header needs that only the payload can tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/recipe.h"
#include "xxh3.h"

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

// Some parts that follow one another, whole pages where there are pages.
struct FrameRun {
    size_t first, count, bytes;
};

// Checks a frame and decodes it into its block, all at once or as it comes from a disk. What it was
// given has to stay until it is done; one thread at a time.
class FrameDecoder {
 public:
    // `digest` is the payload's, `block` has room for all that the frame decodes to. A recipe is
    // that of the lossy codec which it may be of.
    FrameDecoder(const codec::Recipe* lossy, codec::Element element, uint8_t* header,
                 size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                 const uint8_t* digest, uint8_t* block, size_t block_bytes);

    // Takes in that the header and so many bytes of the payload have come, and decodes what can be
    // of them. False where the frame is damaged, of another block, or of a lossy codec that is not
    // the one that is given, if any; then what lies in the block means nothing, and there is no
    // more to be taken in. So it does until all of the payload has come. The header is as before.
    bool take(size_t come);

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
    uint8_t* block_;   // where the next run goes
    const bool past_;  // the caches
    const size_t block_bytes_;
    bool opened_ = false;
    std::vector<codec::Decoded> parts_;
    std::vector<FrameRun> runs_;
    size_t next_ = 0;  // of the runs
    size_t come_ = 0;  // bytes of the payload that were taken in
    DigestedCopy payload_digest_, block_digest_;
};

// The same at once, of a frame that is there.
bool decode_frame(const codec::Recipe* lossy, codec::Element element, uint8_t* header,
                  size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                  const uint8_t* digest, uint8_t* block, size_t block_bytes);

}  // namespace kvtier
