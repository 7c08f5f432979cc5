// Sealing frames: every digest of a header, in one pass over the payload where its own is known.
#include "frame.h"

#include <algorithm>
#include <cstring>

#include "python_bytes.h"
#include "unlocked.h"
#include "xxh3.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr char kMagic[4] = {'K', 'V', 'T', 'f'};
constexpr uint16_t kRaw = 0;

// The fields that matter here, where the drawing has them.
constexpr size_t kCodecAt = 6, kPayloadBytesAt = 16, kEntriesAt = 148, kRawDigestAt = 152,
                 kPayloadDigestAt = 168, kDigestAt = 240, kHeader = 256;
constexpr size_t kEntry = 32, kOffsetAt = 4, kBytesAt = 8, kEntryDigestAt = 16;

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

}  // namespace

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
    const bool known = std::any_of(raw, raw + kDigestBytes, [](uint8_t byte) { return byte != 0; });
    if (is_raw && known) {
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
}
