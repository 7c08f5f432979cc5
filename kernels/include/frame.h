// Frames as kvtier/frame.py describes them: the parts of a header that depend on the payload.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/recipe.h"
#include "encryption.h"
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

// The codec that a header names, unchecked and without the mark of encryption.
uint16_t frame_codec(const uint8_t* header);

// Names a block in a header: space, key, group and shard, as in the header.
inline constexpr size_t kIdentityBytes = 68;
using FrameIdentity = std::array<uint8_t, kIdentityBytes>;

// Encrypts a payload to `into`, which may be the payload, and the block's digest in the header;
// computes that digest if a raw frame has none. Marks the header, and fills in key id, nonce and
// tag; `seal_frame` does the rest. The header must have the block's identity. `nonce` must never be
// used twice for one block. Returns false and writes nothing if the header does not describe this
// payload, or is encrypted already.
bool encrypt_frame(const FrameKeys& keys, const uint8_t* nonce, uint8_t* header,
                   size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                   uint8_t* into);

// Decrypts a frame while it arrives. Not thread-safe.
class FrameDecryption {
 public:
    // `error()` is ENOKEY if `keys` lack the frame's key, and EBADMSG if the header has another
    // identity; nothing else may then be called.
    FrameDecryption(const FrameKeys& keys, const FrameIdentity& identity, const uint8_t* header,
                    size_t header_bytes);
    int error() const { return error_; }
    // Decrypts the next bytes of the payload. They are not verified before `finish`.
    void add(const uint8_t* from, uint8_t* to, size_t nbytes) { gcm_->add(from, to, nbytes); }
    // After the whole payload: whether it and the header are what was encrypted; writes the digest.
    bool finish(uint8_t* raw_digest);

 private:
    const uint8_t* const header_;
    int error_ = 0;
    std::optional<Gcm> gcm_;
};

// A frame of a file, as its header must describe it.
struct FramePlace {
    int fd;
    uint64_t at;
    size_t header_bytes, payload_bytes;
    codec::Codec codec;  // one that needs no profile
    uint64_t epoch;
    std::array<uint8_t, kDigestBytes> digest;  // the payload's
    FrameIdentity identity;
};

// Reads `each` bytes from each of `starts` of the block of a frame, one after another, to `into`.
// Reads whole pages, of the header and of the entries that have some of these bytes. Returns false
// if the header is not the one described, an entry that was read has another digest or cannot be
// decoded, or a read fails; then the content of `into` is undefined. Compares no digest of the
// whole payload or block.
bool read_frame_parts(const FramePlace& frame, codec::Element element, size_t block_bytes,
                      std::span<const uint64_t> starts, size_t each, uint8_t* into);

// The same for a few raw frames, whose layers have `layer_bytes`: submits the reads of all headers
// and of the first layers together, so that no read waits for another. `sound` gets a byte for each
// frame. Returns false and does nothing if there are other frames, or too many bytes.
bool read_raw_parts(std::span<const FramePlace> frames, size_t block_bytes,
                    std::span<const uint64_t> starts, size_t each, size_t layer_bytes,
                    uint8_t* into, uint8_t* sound);

// Parts in sequence that are decoded together; whole pages if the codec reorders pages.
struct FrameRun {
    size_t first, count, bytes;
};

// Checks a frame and decodes it into its block, at once or while it arrives from a disk. Its
// arguments must stay valid until it is done. Not thread-safe.
class FrameDecoder {
 public:
    // `digest` is the payload's. If it is null, the frame was never on a disk: it may be in planes,
    // and the digest of the decoded block alone decides. `block` has room for all of the decoded
    // frame. `lossy` is the recipe of the only lossy codec that it may have, or null. With `keys`
    // it must be an encrypted frame of this identity; its payload is then overwritten.
    FrameDecoder(const codec::Recipe* lossy, codec::Element element, uint8_t* header,
                 size_t header_bytes, uint8_t* payload, size_t payload_bytes, const uint8_t* digest,
                 uint8_t* block, size_t block_bytes, const FrameKeys* keys = nullptr,
                 const FrameIdentity* identity = nullptr);

    // Reports that the header and `arrived` bytes of the payload have arrived, and decodes what is
    // complete. Returns false if the frame is damaged, another block's, or of another lossy codec;
    // then the content of the block is undefined, and the caller must not call again. Also false
    // until the whole payload has arrived. Restores the header.
    bool take(size_t arrived);
    // Why `take` returned false: ENOKEY if the key of the frame is missing, otherwise EBADMSG.
    int error() const { return error_; }
    // The block's, after the whole payload.
    const std::array<uint8_t, kDigestBytes>& block_digest() const { return found_; }

 private:
    bool open();
    bool decrypt(size_t arrived);
    bool decode_arrived();
    const codec::Order* order() const;
    bool decode(const FrameRun& run);

    const codec::Recipe* lossy_;
    const codec::Element element_;
    uint8_t* const header_;
    const size_t header_bytes_;
    uint8_t* const payload_;
    const size_t payload_bytes_;
    const uint8_t* const digest_;
    const FrameKeys* const keys_;
    const FrameIdentity* const identity_;
    std::optional<FrameDecryption> decryption_;
    bool is_raw_ = false;  // encrypted, and not encoded
    int error_;
    uint8_t* block_;        // where the next run is written
    const bool streaming_;  // bypasses the caches
    const size_t block_bytes_;
    bool opened_ = false;
    std::vector<codec::Decoded> parts_;
    std::vector<FrameRun> runs_;
    size_t next_ = 0;     // the next run
    size_t arrived_ = 0;  // bytes of the payload that have arrived
    DigestedCopy payload_digest_, block_digest_;
    std::array<uint8_t, kDigestBytes> found_{};
};

}  // namespace kvtier
