// Frames: sealing them, every digest of a header in one pass over the payload where its own is
// known; and encoding blocks into them and back.
#include "frame.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/numbers.h"
#include "python_bytes.h"
#include "unlocked.h"
#include "xxh3.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr char kMagic[4] = {'K', 'V', 'T', 'f'};
constexpr uint16_t kRaw = 0;

// The fields that matter here, where the drawing has them.
constexpr size_t kVersionAt = 4, kCodecAt = 6, kHeaderBytesAt = 8, kPayloadBytesAt = 16,
                 kRawBytesAt = 24, kEntriesAt = 148, kRawDigestAt = 152, kPayloadDigestAt = 168,
                 kDigestAt = 240, kHeader = 256;
constexpr size_t kEntry = 32, kEntryCodecAt = 3, kOffsetAt = 4, kBytesAt = 8, kEntryRawAt = 12,
                 kEntryDigestAt = 16;
constexpr uint16_t kVersion = 1;

template <typename T>
T field(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

bool fits(const uint8_t* header, size_t header_bytes, size_t payload_bytes) {
    if (header_bytes < kHeader || std::memcmp(header, kMagic, sizeof kMagic) != 0) return false;
    if (field<uint64_t>(header + kPayloadBytesAt) != payload_bytes) return false;
    const size_t count = field<uint32_t>(header + kEntriesAt);
    if (count > (header_bytes - kHeader) / kEntry) return false;
    for (size_t i = 0; i < count; i++) {
        const uint8_t* entry = header + kHeader + i * kEntry;
        const size_t offset = field<uint32_t>(entry + kOffsetAt);
        const size_t bytes = field<uint32_t>(entry + kBytesAt);
        if (offset > payload_bytes || bytes > payload_bytes - offset) return false;
    }
    return true;
}

template <typename T>
void put(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

bool is_known(const uint8_t* digest) {
    return std::any_of(digest, digest + kDigestBytes, [](uint8_t byte) { return byte != 0; });
}

bool is_digest(const uint8_t* digest, const uint8_t* bytes, size_t count) {
    uint8_t found[kDigestBytes];
    xxh3_128(bytes, count, 0, found);
    return std::memcmp(found, digest, kDigestBytes) == 0;
}

// Whether the header's own digest is right.
bool is_sound(uint8_t* header, size_t header_bytes) {
    uint8_t said[kDigestBytes];
    std::memcpy(said, header + kDigestAt, kDigestBytes);
    std::memset(header + kDigestAt, 0, kDigestBytes);
    const bool sound = is_digest(said, header, header_bytes);
    std::memcpy(header + kDigestAt, said, kDigestBytes);
    return sound;
}

}  // namespace

uint16_t frame_codec(const uint8_t* header) { return field<uint16_t>(header + kCodecAt); }

size_t encode_frame(codec::Codec codec, codec::Element element, uint8_t* header,
                    size_t header_bytes, const uint8_t* block, size_t block_bytes, uint8_t* into) {
    if (!fits(header, header_bytes, block_bytes)) return 0;
    if (field<uint64_t>(header + kRawBytesAt) != block_bytes) return 0;
    const size_t count = field<uint32_t>(header + kEntriesAt);
    std::vector<codec::Encoded> parts(count);
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t bytes = field<uint32_t>(header + kHeader + i * kEntry + kEntryRawAt);
        if (bytes > block_bytes - at) return 0;
        parts[i] = {block + at, bytes, codec::Codec::kRaw, 0};
        at += bytes;
    }
    if (at != block_bytes) return 0;
    const size_t payload_bytes = codec::encode(codec, element, parts, into);
    if (payload_bytes >= block_bytes) return block_bytes;
    put(header + kCodecAt, static_cast<uint16_t>(codec));
    put(header + kPayloadBytesAt, static_cast<uint64_t>(payload_bytes));
    if (!is_known(header + kRawDigestAt)) xxh3_128(block, block_bytes, 0, header + kRawDigestAt);
    size_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        uint8_t* const entry = header + kHeader + i * kEntry;
        entry[kEntryCodecAt] = static_cast<uint8_t>(parts[i].codec);
        put(entry + kOffsetAt, static_cast<uint32_t>(offset));
        put(entry + kBytesAt, static_cast<uint32_t>(parts[i].bytes));
        offset += parts[i].bytes;
    }
    return payload_bytes;
}

bool decode_frame(codec::Element element, uint8_t* header, size_t header_bytes,
                  const uint8_t* payload, size_t payload_bytes, const uint8_t* digest,
                  uint8_t* block, size_t block_bytes) {
    if (!fits(header, header_bytes, payload_bytes)) return false;
    if (field<uint16_t>(header + kVersionAt) != kVersion ||
        field<uint32_t>(header + kHeaderBytesAt) != header_bytes ||
        field<uint64_t>(header + kRawBytesAt) != block_bytes ||
        std::memcmp(header + kPayloadDigestAt, digest, kDigestBytes) != 0 ||
        !is_sound(header, header_bytes) || !is_digest(digest, payload, payload_bytes)) {
        return false;
    }
    const size_t count = field<uint32_t>(header + kEntriesAt);
    std::vector<codec::Decoded> parts(count);
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t* const entry = header + kHeader + i * kEntry;
        const size_t bytes = field<uint32_t>(entry + kEntryRawAt);
        if (bytes > block_bytes - at) return false;
        parts[i] = {payload + field<uint32_t>(entry + kOffsetAt), field<uint32_t>(entry + kBytesAt),
                    static_cast<codec::Codec>(entry[kEntryCodecAt]), block + at, bytes};
        at += bytes;
    }
    return at == block_bytes && codec::decode(element, parts) == count &&
           is_digest(header + kRawDigestAt, block, block_bytes);
}

bool seal_frame(uint8_t* header, size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                uint8_t* digest) {
    if (!fits(header, header_bytes, payload_bytes)) return false;
    const size_t count = field<uint32_t>(header + kEntriesAt);
    for (size_t i = 0; i < count; i++) {
        uint8_t* entry = header + kHeader + i * kEntry;
        xxh3_128(payload + field<uint32_t>(entry + kOffsetAt), field<uint32_t>(entry + kBytesAt), 0,
                 entry + kEntryDigestAt);
    }
    uint8_t* const raw = header + kRawDigestAt;
    const bool is_raw = field<uint16_t>(header + kCodecAt) == kRaw;
    if (is_raw && is_known(raw)) {
        std::memcpy(digest, raw, kDigestBytes);
    } else {
        xxh3_128(payload, payload_bytes, 0, digest);
        if (is_raw) std::memcpy(raw, digest, kDigestBytes);
    }
    std::memcpy(header + kPayloadDigestAt, digest, kDigestBytes);
    std::memset(header + kDigestAt, 0, kDigestBytes);
    uint8_t own[kDigestBytes];
    xxh3_128(header, header_bytes, 0, own);
    std::memcpy(header + kDigestAt, own, kDigestBytes);
    return true;
}

}  // namespace kvtier

void bind_frame(nb::module_& m) {
    using namespace kvtier;
    using namespace nb::literals;
    m.def(
        "seal_frame",
        [](nb::handle header, nb::handle payload) {
            Held text, bytes;
            text.take(header, Access::kWrite, Shape::kContiguous, "header");
            bytes.take(payload, Access::kRead, Shape::kContiguous, "payload");
            NewBytes digest(kDigestBytes);
            bool sealed = false;
            {
                const Unlocked unlocked;
                sealed =
                    seal_frame(text.data(), text.size(), bytes.data(), bytes.size(), digest.data());
            }
            if (!sealed) throw nb::value_error("header: none of this payload");
            return digest.object;
        },
        "header"_a, "payload"_a);
    m.def(
        "encode_frame",
        [](uint32_t number, uint32_t element, nb::handle header, nb::handle block,
           nb::handle into) {
            Held text, bytes, to;
            text.take(header, Access::kWrite, Shape::kContiguous, "header");
            bytes.take(block, Access::kRead, Shape::kContiguous, "block");
            to.take(into, Access::kWrite, Shape::kContiguous, "into");
            const codec::Codec by = codec::codec_of(number);
            if (by > codec::Codec::kR32) throw nb::value_error("codec: a lossless one");
            const codec::Element is = codec::element_of(element);
            if (to.size() < codec::bound(bytes.size())) {
                throw nb::value_error("into: smaller than the bound");
            }
            size_t found = 0;
            {
                const Unlocked unlocked;
                found = encode_frame(by, is, text.data(), text.size(), bytes.data(), bytes.size(),
                                     to.data());
            }
            if (found == 0) throw nb::value_error("header: none of this block");
            return found;
        },
        "codec"_a, "element"_a, "header"_a, "block"_a, "into"_a);
    m.def(
        "decode_frame",
        [](uint32_t element, nb::handle header, nb::handle payload, nb::bytes digest,
           nb::handle into) {
            Held text, bytes, to;
            text.take(header, Access::kWrite, Shape::kContiguous, "header");
            bytes.take(payload, Access::kRead, Shape::kContiguous, "payload");
            to.take(into, Access::kWrite, Shape::kContiguous, "into");
            const codec::Element is = codec::element_of(element);
            if (digest.size() != kDigestBytes) throw nb::value_error("digest: 16 bytes");
            const auto* expected = reinterpret_cast<const uint8_t*>(digest.c_str());
            const Unlocked unlocked;
            return decode_frame(is, text.data(), text.size(), bytes.data(), bytes.size(), expected,
                                to.data(), to.size());
        },
        "element"_a, "header"_a, "payload"_a, "digest"_a, "into"_a);
}
