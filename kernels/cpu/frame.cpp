// Frames: sealing them, every digest of a header in one pass over the payload where its own is
// known; and encoding blocks into them and back.
#include "frame.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "codec/numbers.h"
#include "python_bytes.h"
#include "unlocked.h"
#include "xxh3.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

using codec::Codec;
using codec::Recipe;

using Lie = std::tuple<uint32_t, uint32_t, uint32_t, bool>;  // a Grid

constexpr char kMagic[4] = {'K', 'V', 'T', 'f'};
constexpr uint16_t kRaw = 0;

// The fields that matter here, where the drawing has them.
constexpr size_t kVersionAt = 4, kCodecAt = 6, kHeaderBytesAt = 8, kFlagsAt = 12,
                 kPayloadBytesAt = 16, kRawBytesAt = 24, kEntriesAt = 148, kRawDigestAt = 152,
                 kPayloadDigestAt = 168, kGenerationAt = 212, kProfileAt = 224, kDigestAt = 240,
                 kHeader = 256;
constexpr size_t kEntry = 32, kPartAt = 2, kEntryCodecAt = 3, kOffsetAt = 4, kBytesAt = 8,
                 kEntryRawAt = 12, kEntryDigestAt = 16;
constexpr uint16_t kVersion = 1;
constexpr uint32_t kFlags = 1;  // has a parent
constexpr uint8_t kOnce = 1;    // been through a lossy codec: never again

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

const uint8_t* entry_of(const uint8_t* header, size_t number) {
    return header + kHeader + number * kEntry;
}

// A block's parts as its header lists them, one after the other. False where they are not the
// block.
bool parts_of(const uint8_t* header, const uint8_t* block, size_t block_bytes,
              std::vector<codec::Encoded>& parts) {
    parts.resize(field<uint32_t>(header + kEntriesAt));
    size_t at = 0;
    for (size_t i = 0; i < parts.size(); i++) {
        const size_t bytes = field<uint32_t>(entry_of(header, i) + kEntryRawAt);
        if (bytes > block_bytes - at) return false;
        parts[i] = {block + at, bytes, Codec::kRaw, 0};
        at += bytes;
    }
    return at == block_bytes;
}

// Says in a header how its block is encoded.
void describe(uint8_t* header, Codec codec, std::span<const codec::Encoded> parts,
              size_t payload_bytes) {
    put(header + kCodecAt, static_cast<uint16_t>(codec));
    put(header + kPayloadBytesAt, static_cast<uint64_t>(payload_bytes));
    size_t offset = 0;
    for (size_t i = 0; i < parts.size(); i++) {
        uint8_t* const entry = header + kHeader + i * kEntry;
        entry[kEntryCodecAt] = static_cast<uint8_t>(parts[i].codec);
        put(entry + kOffsetAt, static_cast<uint32_t>(offset));
        put(entry + kBytesAt, static_cast<uint32_t>(parts[i].bytes));
        offset += parts[i].bytes;
    }
}

// Which parts are worked on together, so that memory for them fits the nearer caches.
constexpr size_t kTogether = size_t{1} << 20;

size_t width_of(codec::Element element) { return element == codec::Element::kFp32 ? 4 : 2; }

// Some parts that follow one another, whole pages where there are pages.
struct Run {
    size_t first, count, bytes;
};

// False where the parts of a layer are not all there, and no page.
template <typename Part>
bool runs_of(const Recipe& by, codec::Element element, std::span<const Part> parts,
             std::vector<Run>& runs) {
    const size_t step = by.order ? by.order->parts : 1;
    const size_t page = by.order ? by.order->page() * width_of(element) : 0;
    if (parts.size() % step != 0) return false;
    Run run{};
    for (size_t i = 0; i < parts.size(); i += step) {
        size_t bytes = 0;
        for (size_t k = 0; k < step; k++) bytes += parts[i + k].raw_bytes;
        if (by.order && bytes != page) return false;
        if (run.count != 0 && run.bytes + bytes > kTogether) {
            runs.push_back(run);
            run = {i, 0, 0};
        }
        run.count += step;
        run.bytes += bytes;
    }
    if (run.count != 0) runs.push_back(run);
    return true;
}

// Memory for any of these runs.
class Scratch {
 public:
    explicit Scratch(std::span<const Run> runs) {
        size_t most = 0;
        for (const Run& run : runs) most = std::max(most, run.bytes);
        bytes_ = std::make_unique_for_overwrite<uint8_t[]>(most);
    }
    uint8_t* data() { return bytes_.get(); }

 private:
    std::unique_ptr<uint8_t[]> bytes_;
};

void reorder(const Recipe& by, codec::Element element, const uint8_t* from, uint8_t* to,
             size_t bytes, bool back) {
    const size_t width = width_of(element);
    codec::reorder(*by.order, width, from, to, bytes / (by.order->page() * width), back);
}

// Encodes a block's parts; the payload's bytes.
size_t encode_runs(const Recipe& by, codec::Element element, std::vector<codec::Encoded>& parts,
                   std::span<const Run> runs, uint8_t* into) {
    if (!by.order) return codec::encode(by.codec, element, parts, into);
    Scratch ordered(runs);
    size_t done = 0;
    for (const Run& run : runs) {
        const std::span<codec::Encoded> some(parts.data() + run.first, run.count);
        reorder(by, element, some.front().raw, ordered.data(), run.bytes, false);
        const uint8_t* from = ordered.data();
        for (codec::Encoded& part : some) {
            part.raw = from;
            from += part.raw_bytes;
        }
        done += codec::encode(by.codec, element, some, into + done);
    }
    return done;
}

// Decodes parts to where they say, in a block that they make up. False where one is damaged.
bool decode_runs(const Recipe& by, codec::Element element, std::vector<codec::Decoded>& parts) {
    if (!by.order) return codec::decode(element, parts) == parts.size();
    std::vector<Run> runs;
    if (!runs_of(by, element, std::span<const codec::Decoded>(parts), runs)) return false;
    Scratch ordered(runs);
    for (const Run& run : runs) {
        const std::span<codec::Decoded> some(parts.data() + run.first, run.count);
        uint8_t* const page = some.front().raw;
        uint8_t* to = ordered.data();
        for (codec::Decoded& part : some) {
            part.raw = to;
            to += part.raw_bytes;
        }
        if (codec::decode(element, some) != some.size()) return false;
        reorder(by, element, ordered.data(), page, run.bytes, true);
    }
    return true;
}

// The digest of the block that these parts, encoded one after the other, decode to. False where one
// does not decode: an encoder is wrong.
bool digest_of_what_comes_back(const Recipe& by, codec::Element element,
                               std::span<const codec::Encoded> encoded, std::span<const Run> runs,
                               const uint8_t* payload, size_t block_bytes, uint8_t* digest) {
    Scratch back(runs), copy(runs);
    DigestedCopy digested(block_bytes, false);
    std::vector<codec::Decoded> parts;
    for (const Run& run : runs) {
        parts.clear();
        uint8_t* to = back.data();
        for (const codec::Encoded& one : encoded.subspan(run.first, run.count)) {
            parts.push_back(
                {payload, one.bytes, one.codec, to, one.raw_bytes, one.channels, one.heads_first});
            payload += one.bytes;
            to += one.raw_bytes;
        }
        if (!decode_runs(by, element, parts)) return false;
        digested.add(copy.data(), back.data(), run.bytes);
    }
    digested.finish(digest);
    return true;
}

}  // namespace

uint16_t frame_codec(const uint8_t* header) { return field<uint16_t>(header + kCodecAt); }

size_t encode_frame(Codec codec, codec::Element element, uint8_t* header, size_t header_bytes,
                    const uint8_t* block, size_t block_bytes, uint8_t* into) {
    std::vector<codec::Encoded> parts;
    if (!fits(header, header_bytes, block_bytes) ||
        field<uint64_t>(header + kRawBytesAt) != block_bytes ||
        !parts_of(header, block, block_bytes, parts)) {
        return 0;
    }
    const size_t payload_bytes = codec::encode(codec, element, parts, into);
    if (payload_bytes >= block_bytes) return block_bytes;
    describe(header, codec, parts, payload_bytes);
    if (!is_known(header + kRawDigestAt)) xxh3_128(block, block_bytes, 0, header + kRawDigestAt);
    return payload_bytes;
}

size_t encode_frame(const Recipe& by, codec::Element element, uint8_t* header, size_t header_bytes,
                    const uint8_t* block, size_t block_bytes, std::span<const codec::Grid> grids,
                    uint32_t position, uint8_t* into) {
    std::vector<codec::Encoded> parts;
    if (!fits(header, header_bytes, block_bytes) ||
        field<uint64_t>(header + kRawBytesAt) != block_bytes ||
        !parts_of(header, block, block_bytes, parts) ||
        (!grids.empty() && grids.size() != parts.size())) {
        return 0;
    }
    if (is_known(header + kRawDigestAt) && !is_digest(header + kRawDigestAt, block, block_bytes)) {
        return block_bytes;
    }
    for (size_t i = 0; i < parts.size(); i++) {
        const uint8_t* const entry = entry_of(header, i);
        parts[i].channels = by.of(field<uint16_t>(entry), entry[kPartAt]);
        parts[i].heads_first = by.heads_first;
        parts[i].position = position;
        if (!grids.empty()) parts[i].grid = grids[i];
    }
    std::vector<Run> runs;
    if (!runs_of(by, element, std::span<const codec::Encoded>(parts), runs)) return 0;
    const size_t payload_bytes = encode_runs(by, element, parts, runs, into);
    if (payload_bytes >= block_bytes) return block_bytes;
    uint8_t digest[kDigestBytes];
    if (!digest_of_what_comes_back(by, element, parts, runs, into, block_bytes, digest)) {
        return block_bytes;
    }
    describe(header, by.codec, parts, payload_bytes);
    std::memcpy(header + kRawDigestAt, digest, kDigestBytes);
    std::memcpy(header + kProfileAt, by.profile.data(), codec::kProfileBytes);
    header[kGenerationAt] = kOnce;
    return payload_bytes;
}

bool decode_frame(const Recipe* lossy, codec::Element element, uint8_t* header, size_t header_bytes,
                  const uint8_t* payload, size_t payload_bytes, const uint8_t* digest,
                  uint8_t* block, size_t block_bytes) {
    if (!fits(header, header_bytes, payload_bytes)) return false;
    if (field<uint16_t>(header + kVersionAt) != kVersion ||
        (field<uint32_t>(header + kFlagsAt) & ~kFlags) != 0 ||
        field<uint32_t>(header + kHeaderBytesAt) != header_bytes ||
        field<uint64_t>(header + kRawBytesAt) != block_bytes ||
        std::memcmp(header + kPayloadDigestAt, digest, kDigestBytes) != 0 ||
        !is_sound(header, header_bytes) || !is_digest(digest, payload, payload_bytes)) {
        return false;
    }
    const uint16_t number = frame_codec(header);
    if (lossy != nullptr && number == static_cast<uint16_t>(lossy->codec)) {
        if (std::memcmp(header + kProfileAt, lossy->profile.data(), codec::kProfileBytes) != 0 ||
            header[kGenerationAt] != kOnce) {
            return false;
        }
    } else if (number <= static_cast<uint16_t>(Codec::kR32)) {
        lossy = nullptr;
    } else {
        return false;
    }
    const size_t count = field<uint32_t>(header + kEntriesAt);
    std::vector<codec::Decoded> parts(count);
    size_t at = 0, from = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t* const entry = entry_of(header, i);
        const size_t bytes = field<uint32_t>(entry + kEntryRawAt);
        const size_t offset = field<uint32_t>(entry + kOffsetAt);
        if (bytes > block_bytes - at || offset < from) return false;
        from = offset + field<uint32_t>(entry + kBytesAt);
        const uint8_t by = entry[kEntryCodecAt];
        if (by != kRaw && by != number) return false;
        parts[i] = {payload + offset, from - offset, static_cast<Codec>(by), block + at, bytes};
        if (lossy != nullptr) {
            parts[i].channels = lossy->of(field<uint16_t>(entry), entry[kPartAt]);
            parts[i].heads_first = lossy->heads_first;
        }
        at += bytes;
    }
    if (at != block_bytes) return false;
    const bool decoded = lossy != nullptr ? decode_runs(*lossy, element, parts)
                                          : codec::decode(element, parts) == count;
    return decoded && is_digest(header + kRawDigestAt, block, block_bytes);
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
        "encode_lossy_frame",
        [](const codec::SharedRecipe& by, uint32_t element, nb::handle header, nb::handle block,
           nb::handle into, const std::vector<Lie>& lies, uint32_t position) {
            Held text, bytes, to;
            text.take(header, Access::kWrite, Shape::kContiguous, "header");
            bytes.take(block, Access::kRead, Shape::kContiguous, "block");
            to.take(into, Access::kWrite, Shape::kContiguous, "into");
            const codec::Element is = codec::element_of(element);
            if (to.size() < codec::bound(bytes.size())) {
                throw nb::value_error("into: smaller than the bound");
            }
            std::vector<codec::Grid> grids;
            for (const auto& [rows, channels, head, by_token] : lies) {
                grids.push_back({rows, channels, head, by_token});
            }
            size_t found = 0;
            {
                const Unlocked unlocked;
                found = encode_frame(*by.shared, is, text.data(), text.size(), bytes.data(),
                                     bytes.size(), grids, position, to.data());
            }
            if (found == 0) throw nb::value_error("header: none of this block");
            return found;
        },
        "by"_a, "element"_a, "header"_a, "block"_a, "into"_a, "grids"_a, "position"_a);
    m.def(
        "decode_frame",
        [](uint32_t element, nb::handle header, nb::handle payload, nb::bytes digest,
           nb::handle into, const codec::SharedRecipe* lossy) {
            Held text, bytes, to;
            text.take(header, Access::kWrite, Shape::kContiguous, "header");
            bytes.take(payload, Access::kRead, Shape::kContiguous, "payload");
            to.take(into, Access::kWrite, Shape::kContiguous, "into");
            const codec::Element is = codec::element_of(element);
            if (digest.size() != kDigestBytes) throw nb::value_error("digest: 16 bytes");
            const auto* expected = reinterpret_cast<const uint8_t*>(digest.c_str());
            const Recipe* const by = lossy != nullptr ? lossy->shared.get() : nullptr;
            const Unlocked unlocked;
            return decode_frame(by, is, text.data(), text.size(), bytes.data(), bytes.size(),
                                expected, to.data(), to.size());
        },
        "element"_a, "header"_a, "payload"_a, "digest"_a, "into"_a, "lossy"_a.none() = nb::none());
}
