// Seals frames, with one pass over a payload whose digest is known; encodes and decodes blocks.
#include "frame.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "codec/parts.h"
#include "copy.h"
#include "page.h"
#include "page_reads.h"
#include "xxh3.h"

namespace kvtier {
namespace {

using codec::Codec;
using codec::Recipe;

constexpr char kMagic[4] = {'K', 'V', 'T', 'f'};
constexpr uint16_t kRaw = 0;

// The offsets of the fields that are used here.
constexpr size_t kVersionAt = 4, kCodecAt = 6, kHeaderBytesAt = 8, kFlagsAt = 12,
                 kPayloadBytesAt = 16, kRawBytesAt = 24, kEpochAt = 32, kSpaceAt = 48,
                 kParentAt = 112, kGroupAt = 144, kEntriesAt = 148, kRawDigestAt = 152,
                 kPayloadDigestAt = 168, kNonceAt = 184, kTagAt = 196, kGenerationAt = 212,
                 kKeyIdAt = 216, kProfileAt = 224, kDigestAt = 240, kHeader = 256;
constexpr size_t kEntry = 32, kPartAt = 2, kEntryCodecAt = 3, kOffsetAt = 4, kBytesAt = 8,
                 kEntryRawAt = 12, kEntryDigestAt = 16;
constexpr uint16_t kEncrypted = 0x80;  // in the codec
constexpr char kKeyInfo[] = "kvtier frame 1";
constexpr uint16_t kVersion = 1;
constexpr uint32_t kFlags = 1;  // there is a parent
// Fewer unneeded bytes between two entries are read with them: that is faster than another read.
constexpr size_t kGapMost = 64 * 1024;
// The most bytes that are read at once, except for a larger entry: each thread has them in memory.
constexpr size_t kReadMost = 4 << 20;
// The most bytes that one thread digests and copies after it has read all of them.
constexpr size_t kAtOnceBytes = 1 << 20;
constexpr uint8_t kOnce = 1;  // was encoded with a lossy codec: never encode it lossily again

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

// True if the header's own digest matches.
bool is_sound(uint8_t* header, size_t header_bytes) {
    uint8_t digest[kDigestBytes];
    std::memcpy(digest, header + kDigestAt, kDigestBytes);
    std::memset(header + kDigestAt, 0, kDigestBytes);
    const bool sound = is_digest(digest, header, header_bytes);
    std::memcpy(header + kDigestAt, digest, kDigestBytes);
    return sound;
}

const uint8_t* entry_of(const uint8_t* header, size_t number) {
    return header + kHeader + number * kEntry;
}

// The parts of a block, as its header lists them. Returns false if they do not match the block.
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

FrameIdentity identity_of(const uint8_t* header) {
    FrameIdentity identity;
    std::memcpy(identity.data(), header + kSpaceAt, kParentAt - kSpaceAt);
    std::memcpy(identity.data() + (kParentAt - kSpaceAt), header + kGroupAt, kEntriesAt - kGroupAt);
    return identity;
}

// Each block has a key of its own, so that its nonces can only repeat among its own frames.
std::vector<uint8_t> key_info(const FrameIdentity& identity) {
    std::vector<uint8_t> info(kKeyInfo, kKeyInfo + sizeof kKeyInfo - 1);
    info.insert(info.end(), identity.begin(), identity.end());
    return info;
}

// The fields that the tag covers, and that do not change when a frame is copied: not epoch,
// sequence, parent and digests.
std::vector<uint8_t> authenticated_fields(const uint8_t* header) {
    std::vector<uint8_t> all;
    const auto add = [&](const uint8_t* from, const uint8_t* until) {
        all.insert(all.end(), from, until);
    };
    add(header, header + kFlagsAt);
    add(header + kPayloadBytesAt, header + kEpochAt);
    add(header + kSpaceAt, header + kParentAt);
    add(header + kGroupAt, header + kRawDigestAt);
    add(header + kGenerationAt, header + kDigestAt);
    const size_t count = field<uint32_t>(header + kEntriesAt);
    for (size_t i = 0; i < count; i++) {
        const uint8_t* const entry = entry_of(header, i);
        add(entry, entry + kEntryDigestAt);
    }
    return all;
}

// Writes to a header how its block is encoded.
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

// Parts are processed together if everything made of them fits into the L2 cache.
constexpr size_t kTogether = size_t{256} << 10;

size_t width_of(codec::Element element) { return element == codec::Element::kFp32 ? 4 : 2; }

// Groups the parts into runs. Returns false if parts of a layer are missing: there is no page.
template <typename Part>
bool runs_of(const codec::Order* order, codec::Element element, std::span<const Part> parts,
             std::vector<FrameRun>& runs) {
    const size_t step = order != nullptr ? order->parts : 1;
    const size_t page = order != nullptr ? order->page() * width_of(element) : 0;
    if (parts.size() % step != 0) return false;
    FrameRun run{};
    for (size_t i = 0; i < parts.size(); i += step) {
        size_t bytes = 0;
        for (size_t k = 0; k < step; k++) bytes += parts[i + k].raw_bytes;
        if (order != nullptr && bytes != page) return false;
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

// The buffers of a thread, for all of its runs: too slow to allocate each time.
struct Room {
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    std::vector<Line> lines;

    uint8_t* fit(size_t nbytes) {
        if (lines.size() * sizeof(Line) <= nbytes) lines.resize(nbytes / sizeof(Line) + 1);
        return lines.data()->bytes;
    }
};
struct Rooms {
    Room parts, piece;
};
Rooms& rooms() {
    thread_local Rooms kept;
    return kept;
}

bool decode_to(codec::Element element, std::span<codec::Decoded> parts, uint8_t* to) {
    for (codec::Decoded& part : parts) {
        part.raw = to;
        to += part.raw_bytes;
    }
    return codec::decode(element, parts) == parts.size();
}

// Decodes a run of a block, and passes on its original bytes by pieces. False if it is damaged.
template <typename Emit>
bool decode_run(const codec::Order* order, codec::Element element, std::span<codec::Decoded> parts,
                size_t bytes, const Emit& emit) {
    uint8_t* const run = rooms().parts.fit(bytes);
    if (!decode_to(element, parts, run)) return false;
    if (order == nullptr) {
        emit(run, bytes);
        return true;
    }
    const size_t width = width_of(element), page = order->page() * width;
    const size_t size = page / order->pieces;
    uint8_t* const piece = rooms().piece.fit(size);
    for (size_t at = 0; at < bytes; at += page) {
        for (size_t number = 0; number < order->pieces; number++) {
            codec::reorder_piece(*order, width, run + at, number, piece);
            emit(piece, size);
        }
    }
    return true;
}

// Encodes the runs of a block, and digests the original and the decoded bytes.
struct Encoding {
    const codec::Order* order;
    Codec codec;
    codec::Element element;
    DigestedCopy was, back;
    std::vector<codec::Decoded> again{};

    // Returns the run's encoded bytes; nothing if it does not decode, which is an encoder's bug.
    std::optional<size_t> add(std::span<codec::Encoded> parts, size_t bytes, uint8_t* into) {
        was.add(nullptr, parts.front().raw, bytes);  // this also brings it into the caches
        if (order != nullptr) {
            const size_t width = width_of(element);
            uint8_t* to = rooms().parts.fit(bytes);
            codec::reorder(*order, width, parts.front().raw, to, bytes / width / order->page(),
                           false);
            for (codec::Encoded& part : parts) {
                part.raw = to;
                to += part.raw_bytes;
            }
        }
        const size_t encoded = codec::encode(codec, element, parts, into);
        again.clear();
        for (const codec::Encoded& one : parts) {
            again.push_back({into, one.bytes, one.codec, nullptr, one.raw_bytes, one.channels,
                             one.heads_first});
            into += one.bytes;
        }
        const auto emit = [&](const uint8_t* from, size_t some) { back.add(nullptr, from, some); };
        if (!decode_run(order, element, std::span(again), bytes, emit)) return std::nullopt;
        return encoded;
    }
};

// Memory in whole pages, which reads without the page cache need.
struct Freed {
    void operator()(uint8_t* memory) const { std::free(memory); }
};
using Pages = std::unique_ptr<uint8_t, Freed>;

Pages new_pages(size_t bytes) {
    return Pages(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes)));
}

// Whether a header is the one of this frame, and undamaged.
bool is_of(const FramePlace& frame, uint8_t* header, size_t block_bytes) {
    return fits(header, frame.header_bytes, frame.payload_bytes) &&
           field<uint16_t>(header + kVersionAt) == kVersion &&
           field<uint16_t>(header + kCodecAt) == static_cast<uint16_t>(frame.codec) &&
           field<uint32_t>(header + kHeaderBytesAt) == frame.header_bytes &&
           (field<uint32_t>(header + kFlagsAt) & ~kFlags) == 0 &&
           field<uint64_t>(header + kRawBytesAt) == block_bytes &&
           field<uint64_t>(header + kEpochAt) == frame.epoch &&
           std::memcmp(header + kPayloadDigestAt, frame.digest.data(), kDigestBytes) == 0 &&
           identity_of(header) == frame.identity && is_sound(header, frame.header_bytes) &&
           (codec::lossless(frame.codec) || header[kGenerationAt] == kOnce);
}

// Bytes of a payload that are read together, in whole pages.
struct ReadRange {
    size_t low = 0, high = 0;
    size_t bytes() const { return high - low; }
};

size_t next_page(size_t at) { return (at + kPage - 1) / kPage * kPage; }

// Where a raw frame has the first of these layers: where the block has them.
ReadRange raw_range(std::span<const uint64_t> starts, size_t each, size_t layer_bytes,
                    size_t block_bytes) {
    std::vector<uint64_t> sorted(starts.begin(), starts.end());
    std::sort(sorted.begin(), sorted.end());
    ReadRange range{sorted.front() / layer_bytes * layer_bytes / kPage * kPage, 0};
    for (const uint64_t start : sorted) {
        const size_t begin = start / layer_bytes * layer_bytes;
        const size_t end = (start + each + layer_bytes - 1) / layer_bytes * layer_bytes;
        const bool is_apart = range.high != 0 && begin > range.high + kGapMost;
        if (is_apart || next_page(end) > range.low + kReadMost) break;
        range.high = std::max(range.high, next_page(std::min(end, block_bytes)));
    }
    return range.high == 0 ? ReadRange{} : range;
}

// What was read of a frame.
struct FrameRead {
    Pages header, payload;
    ReadRange range{};  // that `payload` has
    size_t room = 0;    // of `payload`
};

struct NeededEntry {
    const uint8_t* entry;
    size_t offset, bytes, at, raw_bytes;  // in the payload; in the block
};

// The entries that have chosen bytes. Returns false if the entries do not make up the block.
bool needed_entries(const FramePlace& frame, const uint8_t* header, size_t block_bytes,
                    std::span<const uint64_t> starts, size_t each,
                    std::vector<NeededEntry>& needed) {
    size_t at = 0, from = 0;
    const size_t count = field<uint32_t>(header + kEntriesAt);
    for (size_t i = 0; i < count; i++) {
        const uint8_t* const entry = entry_of(header, i);
        const size_t offset = field<uint32_t>(entry + kOffsetAt);
        const size_t bytes = field<uint32_t>(entry + kBytesAt);
        const size_t raw_bytes = field<uint32_t>(entry + kEntryRawAt);
        const auto by = static_cast<Codec>(entry[kEntryCodecAt]);
        if (offset < from || raw_bytes > block_bytes - at) return false;
        if (by != Codec::kRaw && by != frame.codec) return false;
        if (by == Codec::kRaw && bytes != raw_bytes) return false;
        const auto has = [&](uint64_t start) {
            return start < at + raw_bytes && at < start + each;
        };
        if (std::any_of(starts.begin(), starts.end(), has)) {
            needed.push_back({entry, offset, bytes, at, raw_bytes});
        }
        from = offset + bytes;
        at += raw_bytes;
    }
    return at == block_bytes;
}

// Verifies a header, and takes the chosen bytes from the payload, reading what was not read before.
bool take_parts(const FramePlace& frame, codec::Element element, size_t block_bytes,
                std::span<const uint64_t> starts, size_t each, FrameRead& read, uint8_t* into) {
    uint8_t* const header = read.header.get();
    std::vector<NeededEntry> needed;
    if (!is_of(frame, header, block_bytes) ||
        !needed_entries(frame, header, block_bytes, starts, each, needed)) {
        return false;
    }
    for (size_t first = 0, end; first < needed.size(); first = end) {
        ReadRange range{needed[first].offset / kPage * kPage, 0};
        range.high = range.low;
        for (end = first; end < needed.size(); end++) {
            const NeededEntry& one = needed[end];
            const size_t next = next_page(one.offset + one.bytes);
            if (end != first &&
                (one.offset > range.high + kGapMost || next > range.low + kReadMost)) {
                break;
            }
            range.high = next;
        }
        if (range.bytes() == 0) range.high += kPage;  // entries without bytes
        if (range.low < read.range.low || range.high > read.range.high) {
            if (range.bytes() > read.room) {
                read.payload.reset();  // before there is a larger one
                read.payload = new_pages(read.room = range.bytes());
            }
            if (read.payload == nullptr ||
                !read_pages(frame.fd, frame.at + frame.header_bytes + range.low, range.bytes(),
                            read.payload.get())) {
                return false;
            }
            read.range = range;
        }
        for (size_t i = first; i < end; i++) {
            const NeededEntry& one = needed[i];
            const uint8_t* from = read.payload.get() + (one.offset - read.range.low);
            if (!is_digest(one.entry + kEntryDigestAt, from, one.bytes)) return false;
            const auto by = static_cast<Codec>(one.entry[kEntryCodecAt]);
            if (by != Codec::kRaw) {
                uint8_t* const raw = rooms().parts.fit(one.raw_bytes);
                codec::Decoded part = {from, one.bytes, by, nullptr, one.raw_bytes};
                if (!decode_to(element, std::span(&part, 1), raw)) return false;
                from = raw;
            }
            uint8_t* to = into;
            for (const uint64_t start : starts) {
                const size_t left = std::max<size_t>(start, one.at);
                const size_t right = std::min<size_t>(start + each, one.at + one.raw_bytes);
                if (left < right) {
                    std::memcpy(to + (left - start), from + (left - one.at), right - left);
                }
                to += each;
            }
        }
    }
    return true;
}

}  // namespace

uint16_t frame_codec(const uint8_t* header) {
    return field<uint16_t>(header + kCodecAt) & ~kEncrypted;
}

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
    for (size_t i = 0; i < parts.size(); i++) {
        const uint8_t* const entry = entry_of(header, i);
        parts[i].channels = by.of(field<uint16_t>(entry), entry[kPartAt]);
        parts[i].heads_first = by.heads_first;
        parts[i].position = position;
        if (!grids.empty()) parts[i].grid = grids[i];
    }
    const codec::Order* const order = by.order ? &*by.order : nullptr;
    std::vector<FrameRun> runs;
    if (!runs_of(order, element, std::span<const codec::Encoded>(parts), runs)) return 0;
    const DigestedCopy digest(block_bytes, false);
    Encoding encoding{order, by.codec, element, digest, digest};
    size_t payload_bytes = 0;
    for (const FrameRun& run : runs) {
        const std::span<codec::Encoded> some(parts.data() + run.first, run.count);
        const auto more = encoding.add(some, run.bytes, into + payload_bytes);
        if (!more) return block_bytes;
        payload_bytes += *more;
    }
    uint8_t was[kDigestBytes], back[kDigestBytes];
    encoding.was.finish(was), encoding.back.finish(back);
    const uint8_t* const expected = header + kRawDigestAt;
    if (payload_bytes >= block_bytes ||
        (is_known(expected) && std::memcmp(was, expected, kDigestBytes) != 0)) {
        return block_bytes;
    }
    describe(header, by.codec, parts, payload_bytes);
    std::memcpy(header + kRawDigestAt, back, kDigestBytes);
    std::memcpy(header + kProfileAt, by.profile.data(), codec::kProfileBytes);
    header[kGenerationAt] = kOnce;
    return payload_bytes;
}

bool encrypt_frame(const FrameKeys& keys, const uint8_t* nonce, uint8_t* header,
                   size_t header_bytes, const uint8_t* payload, size_t payload_bytes,
                   uint8_t* into) {
    const auto number = field<uint16_t>(header + kCodecAt);
    if (!fits(header, header_bytes, payload_bytes) || (number & kEncrypted) != 0) return false;
    put(header + kCodecAt, static_cast<uint16_t>(number | kEncrypted));
    std::memcpy(header + kKeyIdAt, keys.first().id.data(), kKeyIdBytes);
    std::memcpy(header + kNonceAt, nonce, kNonceBytes);
    uint8_t* const raw_digest = header + kRawDigestAt;
    const bool digests = number == kRaw && !is_known(raw_digest);
    DigestedCopy digest(payload_bytes, false);
    Gcm gcm(true, keys.first().secret, key_info(identity_of(header)), nonce,
            authenticated_fields(header));
    for (size_t at = 0; at < payload_bytes; at += kTogether) {
        const size_t some = std::min(kTogether, payload_bytes - at);
        if (digests) digest.add(nullptr, payload + at, some);
        gcm.add(payload + at, into + at, some);
    }
    if (digests) digest.finish(raw_digest);
    gcm.add(raw_digest, raw_digest, kDigestBytes);
    gcm.finish(header + kTagAt);
    return true;
}

FrameDecryption::FrameDecryption(const FrameKeys& keys, const FrameIdentity& identity,
                                 const uint8_t* header, size_t header_bytes)
    : header_(header) {
    const size_t count = header_bytes < kHeader ? 0 : field<uint32_t>(header + kEntriesAt);
    if (header_bytes < kHeader || count > (header_bytes - kHeader) / kEntry ||
        (field<uint16_t>(header + kCodecAt) & kEncrypted) == 0 || identity_of(header) != identity) {
        error_ = EBADMSG;
        return;
    }
    const FrameKeys::Key* const key = keys.find(header + kKeyIdAt);
    if (key == nullptr) {
        error_ = ENOKEY;
        return;
    }
    gcm_.emplace(false, key->secret, key_info(identity), header + kNonceAt,
                 authenticated_fields(header));
}

bool FrameDecryption::finish(uint8_t* raw_digest) {
    gcm_->add(header_ + kRawDigestAt, raw_digest, kDigestBytes);
    return gcm_->verify(header_ + kTagAt);
}

FrameDecoder::FrameDecoder(const Recipe* lossy, codec::Element element, uint8_t* header,
                           size_t header_bytes, uint8_t* payload, size_t payload_bytes,
                           const uint8_t* digest, uint8_t* block, size_t block_bytes,
                           const FrameKeys* keys, const FrameIdentity* identity)
    : lossy_(lossy),
      element_(element),
      header_(header),
      header_bytes_(header_bytes),
      payload_(payload),
      payload_bytes_(payload_bytes),
      digest_(digest),
      keys_(keys),
      identity_(identity),
      error_(EBADMSG),
      block_(block),
      streaming_(block_bytes >= codec::kStreamingLeast),
      block_bytes_(block_bytes),
      payload_digest_(payload_bytes, false),
      block_digest_(block_bytes, streaming_) {}

// Checks everything that the header says about the frame, before reading the payload.
bool FrameDecoder::open() {
    if (!fits(header_, header_bytes_, payload_bytes_)) return false;
    if (field<uint16_t>(header_ + kVersionAt) != kVersion ||
        (field<uint32_t>(header_ + kFlagsAt) & ~kFlags) != 0 ||
        field<uint32_t>(header_ + kHeaderBytesAt) != header_bytes_ ||
        field<uint64_t>(header_ + kRawBytesAt) != block_bytes_ ||
        (digest_ != nullptr &&
         std::memcmp(header_ + kPayloadDigestAt, digest_, kDigestBytes) != 0) ||
        !is_sound(header_, header_bytes_)) {
        return false;
    }
    const uint16_t number = frame_codec(header_);
    const bool encrypted = (field<uint16_t>(header_ + kCodecAt) & kEncrypted) != 0;
    if (encrypted != (keys_ != nullptr)) {
        if (encrypted) error_ = ENOKEY;
        return false;
    }
    if (encrypted) {
        decryption_.emplace(*keys_, *identity_, header_, header_bytes_);
        if (decryption_->error() != 0) {
            error_ = decryption_->error();
            return false;
        }
        is_raw_ = number == kRaw;
    }
    if (lossy_ != nullptr && number == static_cast<uint16_t>(lossy_->codec)) {
        if (std::memcmp(header_ + kProfileAt, lossy_->profile.data(), codec::kProfileBytes) != 0 ||
            header_[kGenerationAt] != kOnce) {
            return false;
        }
    } else if (number <= static_cast<uint16_t>(Codec::kR32) ||
               (digest_ == nullptr && number == static_cast<uint16_t>(Codec::kPlanes))) {
        lossy_ = nullptr;
    } else {
        return false;
    }
    parts_.resize(field<uint32_t>(header_ + kEntriesAt));
    size_t at = 0, from = 0;
    for (size_t i = 0; i < parts_.size(); i++) {
        const uint8_t* const entry = entry_of(header_, i);
        const size_t bytes = field<uint32_t>(entry + kEntryRawAt);
        const size_t offset = field<uint32_t>(entry + kOffsetAt);
        if (bytes > block_bytes_ - at || offset < from) return false;
        if (is_raw_ && offset != at) return false;
        from = offset + field<uint32_t>(entry + kBytesAt);
        const uint8_t by = entry[kEntryCodecAt];
        if (by != kRaw && by != number) return false;
        parts_[i] = {payload_ + offset, from - offset, static_cast<Codec>(by), nullptr, bytes};
        if (lossy_ != nullptr) {
            parts_[i].channels = lossy_->of(field<uint16_t>(entry), entry[kPartAt]);
            parts_[i].heads_first = lossy_->heads_first;
        }
        at += bytes;
    }
    return at == block_bytes_ &&
           runs_of(order(), element_, std::span<const codec::Decoded>(parts_), runs_);
}

const codec::Order* FrameDecoder::order() const {
    return lossy_ != nullptr && lossy_->order ? &*lossy_->order : nullptr;
}

// Decodes a run to its place in the block, and adds it to the block's digest.
bool FrameDecoder::decode(const FrameRun& run) {
    const std::span<codec::Decoded> parts(parts_.data() + run.first, run.count);
    const bool in_planes = frame_codec(header_) == static_cast<uint16_t>(Codec::kPlanes);
    if (order() == nullptr && !in_planes &&
        run.bytes >= codec::kStreamingLeast) {  // bypasses the caches in every case
        if (!decode_to(element_, parts, block_)) return false;
        block_digest_.add(nullptr, block_, run.bytes);
        block_ += run.bytes;
        return true;
    }
    const auto emit = [&](const uint8_t* from, size_t bytes) {
        for (size_t at = 0; at < bytes;) {
            const size_t some = std::min<size_t>(kPage, bytes - at);
            if (streaming_) prefetch_pages(block_ + kPagesAhead, some);
            block_digest_.add(block_, from + at, some);
            block_ += some, at += some;
        }
    };
    if (!in_planes) return decode_run(order(), element_, parts, run.bytes, emit);
    const auto lend = [&](size_t lines) {
        const LentDigest lent = block_digest_.lend(block_, lines);
        block_ += lent.lines * kLine;
        return lent;
    };
    for (const codec::Decoded& part : parts) {
        if (part.codec == Codec::kRaw) {
            if (part.bytes != part.raw_bytes) return false;
            emit(part.from, part.bytes);
        } else if (!codec::decode_planes(element_, part, emit, lend)) {
            return false;
        }
    }
    return true;
}

bool FrameDecoder::take(size_t arrived) {
    if (!opened_ && !open()) return false;
    opened_ = true;
    if (decryption_) {
        if (!decrypt(arrived)) return false;
    } else {
        if (digest_ != nullptr) {
            payload_digest_.add(nullptr, payload_ + arrived_, arrived - arrived_);
        }
        arrived_ = arrived;
        uint8_t found[kDigestBytes];
        if (digest_ != nullptr && arrived_ == payload_bytes_) {
            payload_digest_.finish(found);
            if (std::memcmp(found, digest_, kDigestBytes) != 0) return false;
        }
        if (!decode_arrived()) return false;
    }
    if (streaming_) stream_fence();  // before another thread continues
    if (arrived_ != payload_bytes_) return true;
    uint8_t expected[kDigestBytes];
    std::memcpy(expected, header_ + kRawDigestAt, kDigestBytes);
    if (decryption_ && !decryption_->finish(expected)) return false;
    block_digest_.finish(found_.data());
    return std::memcmp(found_.data(), expected, kDigestBytes) == 0;
}

// Decodes the runs that have arrived.
bool FrameDecoder::decode_arrived() {
    for (; next_ < runs_.size(); next_++) {
        const FrameRun& run = runs_[next_];
        const codec::Decoded& last = parts_[run.first + run.count - 1];
        if (last.from + last.bytes > payload_ + arrived_) break;
        if (!decode(run)) return false;
    }
    return true;
}

// Decrypts what has arrived, in pieces that are decoded or digested while they are in a cache. The
// decoders check every bound, so they may see bytes whose tag is not verified yet.
bool FrameDecoder::decrypt(size_t arrived) {
    while (arrived_ < arrived) {
        const size_t some = std::min(kTogether, arrived - arrived_);
        uint8_t* const from = payload_ + arrived_;
        arrived_ += some;
        if (is_raw_) {
            decryption_->add(from, block_, some);
            block_digest_.add(nullptr, block_, some);
            block_ += some;
            continue;
        }
        decryption_->add(from, from, some);
        if (!decode_arrived()) return false;
    }
    return true;
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

bool read_frame_parts(const FramePlace& frame, codec::Element element, size_t block_bytes,
                      std::span<const uint64_t> starts, size_t each, uint8_t* into) {
    FrameRead read{new_pages(frame.header_bytes), nullptr};
    return read.header != nullptr &&
           read_pages(frame.fd, frame.at, frame.header_bytes, read.header.get()) &&
           take_parts(frame, element, block_bytes, starts, each, read, into);
}

bool read_raw_parts(std::span<const FramePlace> frames, size_t block_bytes,
                    std::span<const uint64_t> starts, size_t each, size_t layer_bytes,
                    uint8_t* into, uint8_t* sound) {
    const ReadRange range = raw_range(starts, each, layer_bytes, block_bytes);
    const auto is_raw = [](const FramePlace& one) { return one.codec == Codec::kRaw; };
    if (2 * frames.size() > kAtOnce || range.bytes() == 0 ||
        frames.size() * range.bytes() > kAtOnceBytes ||
        !std::all_of(frames.begin(), frames.end(), is_raw)) {
        return false;
    }
    std::vector<FrameRead> read(frames.size());
    std::vector<PageRead> reads;
    for (size_t i = 0; i < frames.size(); i++) {
        const FramePlace& one = frames[i];
        read[i] = {new_pages(one.header_bytes), new_pages(range.bytes()), range, range.bytes()};
        if (read[i].header == nullptr || read[i].payload == nullptr) return false;
        reads.push_back({one.fd, one.at, one.header_bytes, read[i].header.get()});
        reads.push_back(
            {one.fd, one.at + one.header_bytes + range.low, range.bytes(), read[i].payload.get()});
    }
    read_at_once(reads);
    const size_t bytes = starts.size() * each;
    for (size_t i = 0; i < frames.size(); i++) {
        if (!reads[2 * i + 1].good) read[i].range = {};
        sound[i] = reads[2 * i].good && take_parts(frames[i], codec::Element{}, block_bytes, starts,
                                                   each, read[i], into + i * bytes);
    }
    return true;
}

}  // namespace kvtier
