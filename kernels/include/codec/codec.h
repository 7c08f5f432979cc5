// Encodes and decodes parts of blocks: plain functions for any thread, without Python and locks.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>

#include "codec/lossless.h"
#include "codec/quantized.h"
#include "cpu.h"
#include "xxh3.h"

namespace kvtier::codec {

// The numbers are those in frames; 3 is not used.
enum class Codec : uint8_t {
    kRaw = 0,
    kFix4 = 1,
    kR32 = 2,
    kQ8 = 4,
    kQ4 = 5,
    kQ2 = 6,
    kEcsq = 7,
    kCachegen = 8,
    kFp8 = 9,
    kE5m2 = 10,
    kNvfp4 = 11,
    kMxfp4 = 12,
    kPlanes = 13  // only in frames that never leave the daemon's memory
};
// True if decoding returns the bytes that were encoded.
constexpr bool lossless(Codec codec) { return codec <= Codec::kR32 || codec == Codec::kPlanes; }
// True if a codec needs the channels of a part.
constexpr bool calibrated(Codec codec) {
    return codec == Codec::kEcsq || codec == Codec::kCachegen;
}
struct Channels;  // calibration.h

// The bits of a code as a part's header has them (fixed_form); 0 for a codec without a fixed rate.
constexpr unsigned fixed_rate(Codec codec) {
    switch (codec) {
        case Codec::kQ8:
            return 8;
        case Codec::kQ4:
            return 4;
        case Codec::kQ2:
            return 2;
        case Codec::kFp8:
            return kFp8Bits;
        case Codec::kE5m2:
            return kE5m2Bits;
        case Codec::kNvfp4:
            return kNvfp4Bits;
        case Codec::kMxfp4:
            return kMxfp4Bits;
        default:
            return 0;
    }
}

// The layout of a part's elements, for codecs that process channels: matrices with `rows` rows, one
// row per token. Without rows the layout is unknown.
struct Grid {
    uint32_t rows = 0, channels = 0;
    uint32_t head = 0;      // channels of a head; a row has whole heads
    bool by_token = false;  // a group is the channels of a token; otherwise the tokens of a channel
};

// A part: its bytes in memory, its encoded bytes, and the codec that encoded them.
struct Encoded {
    const uint8_t* raw;
    size_t raw_bytes;
    Codec codec;   // set by encode()
    size_t bytes;  // set by encode()
    Grid grid = {};
    // For calibrated codecs; a part without channels is stored raw.
    const Channels* channels = nullptr;
    bool heads_first =
        false;              // the tokens of a head are contiguous; otherwise the heads of a token
    uint32_t position = 0;  // of the first token
};
struct Decoded {
    const uint8_t* from;
    size_t bytes;
    Codec codec;
    uint8_t* raw;
    size_t raw_bytes;
    const Channels* channels = nullptr;
    bool heads_first = false;
};

// The maximum size of an encoded part: a part that does not shrink is stored raw.
constexpr size_t bound(size_t raw_bytes) { return raw_bytes; }

// Writes the parts one after another and returns their total size; `out` has room for the bounds of
// all. A part that does not shrink is stored raw. The result is the same on every processor.
size_t encode(Codec codec, Element element, std::span<Encoded> parts, uint8_t* out);

// Writes the bytes of each part to its `raw`. Returns the number of parts, or the index of the
// first part that is damaged or has an unknown codec. Never accesses memory outside of the parts.
size_t decode(Element element, std::span<const Decoded> parts);

// Decodes a part of `planes`, and passes on its bytes in pieces that are in the first cache; or, if
// it was given a digest for the next lines by `lend`, writes and digests them itself. Returns false
// if the part is damaged. `part.raw` is not used.
using Emit = std::function<void(const uint8_t*, size_t)>;
using Lend = std::function<LentDigest(size_t lines)>;
bool decode_planes(Element element, const Decoded& part, const Emit& emit, const Lend& lend);

// --- the kernels ---------------------------------------------------------------------------------

struct alignas(64) EncodeTable {
    uint32_t reciprocal[kSymbolsMost];
    uint32_t packed[kSymbolsMost];  // frequency, bias << 9, shift << 20
    // The same numbers as words, to fit one shuffle, and the state that is too large.
    uint16_t gain[kSymbolsMost];       // 256 - frequency
    uint16_t corrected[kSymbolsMost];  // shift, bias << kShiftBits
    uint32_t fill[kSymbolsMost];       // frequency << 23
};
inline constexpr unsigned kShiftBits = 5;
// The lookup tables of the decoders; each level fills in its own.
struct alignas(64) DecodeTable {
    uint8_t symbol[kScale + 64];    // of each slot; the padding is undefined
    uint32_t packed[kSymbolsMost];  // frequency, start << 16
    uint32_t slot[kScale];          // symbol, frequency << 8, slot - start << 16
    // The symbol of a slot is the number of these that are less than the slot, compared as signed
    // bytes; in groups of four.
    alignas(32) uint8_t below[kSymbolsMost][32];
    uint8_t frequency[kSymbolsMost], start[kSymbolsMost];
    size_t fours;
};

// A stream that is being encoded, from its end: these point to the ends of codes and words.
struct alignas(64) Encoder {
    uint32_t state[kLanes];
    const uint8_t* codes;
    uint16_t* words;
    const EncodeTable* table;
    const uint8_t* next;  // the next input to prefetch: next_step bytes per 32 codes
    size_t next_step;
};
struct alignas(64) Decoder {
    uint32_t state[kLanes];
    uint8_t* codes;
    const uint8_t* words;  // 16 bits each, unaligned
    const DecodeTable* table;
    const uint8_t* next;
    size_t next_step;
};
// The number of streams that are decoded and encoded together, so that their latencies overlap.
inline constexpr size_t kSideBySide = 4, kInTogether = 2;
// Prefetch distances for four streams: larger ones evict what was prefetched.
inline constexpr size_t kWordsAhead = 128, kRestAhead = 512;
// Words that may be read after the last one, or written before the first.
inline constexpr size_t kWordSlack = 32;

// The rows of a part in `planes`: each element has a code, 255 minus its exponent. The 13 most
// frequent codes of a part have the numbers 0 to 2, 5 to 7 and 8 to 14; all others have 15 and are
// escapes. A row has two bits of each element, in a plane each: the number if it is below 4, else
// 3. For the latter, two bits of `second` follow: 7 minus the number if that is positive, else 3;
// and for those of at least 8, three bits of `third`: the lowest bits of the number, the highest of
// them inverted. The bits of a row in `second` and `third` are planes too, which skip the elements
// that have none. So a decoder needs one deposit for each, and one exclusive or.
inline constexpr size_t kPlaneNumbers = 16, kPlaneEscape = 15;
inline constexpr size_t kFirstPlanes = 2 * kRow / 8;  // bytes of a row
static_assert(std::endian::native == std::endian::little);

struct BitWriter {
    uint8_t* at;
    uint64_t bits = 0;
    unsigned count = 0;

    // Adds the `n` lowest bits; the others are zero.
    __attribute__((always_inline)) void add(uint64_t value, unsigned n) {
        bits |= value << count;
        if (count + n < 64) {
            count += n;
            return;
        }
        std::memcpy(at, &bits, 8);
        at += 8;
        bits = count != 0 ? value >> (64 - count) : 0;
        count = count + n - 64;
    }
    // Returns the end.
    uint8_t* finish() {
        std::memcpy(at, &bits, 8);
        return at + (count + 7) / 8;
    }
};
// At least kBeyond bytes after the end can be read.
struct BitReader {
    const uint8_t* from;
    uint64_t at = 0, end;  // in bits

    // The next 57 bits from a place on, and more that are undefined. 8 bytes beyond it are read.
    __attribute__((always_inline)) uint64_t some(uint64_t place) const {
        uint64_t bits;
        std::memcpy(&bits, from + place / 8, 8);
        return bits >> place % 8;
    }
    // The next 64 bits, of which those after the end are undefined.
    __attribute__((always_inline)) uint64_t all(uint64_t place) const {
        if (place > end) return 0;
        return (some(place) & 0xFFFFFFFF) | some(place + 32) << 32;
    }
};
inline constexpr size_t kBeyond = 12;
struct PlaneWriter {
    const uint8_t* numbers;  // of all codes
    uint8_t* first;
    BitWriter second, third;
    uint8_t* escapes;
};
struct PlaneReader {
    alignas(16) uint8_t codes[kPlaneNumbers];
    const uint8_t* first;
    BitReader second, third;
    const uint8_t* escapes;
    size_t escaped;
    const uint8_t* next;  // the input to prefetch: next_step bytes per row, at most 128
    size_t next_step;

    // Whether all bits that were read exist.
    bool is_sound() const { return second.at <= second.end && third.at <= third.end; }
};
// The planes of the numbers of a row's elements, lowest bit first. Bits may be missing: whether
// they were is known afterwards, because at most 24 bytes of a row are read beyond the end, and the
// rests of the rows, which have at least as many bytes each, are behind it. A macro, because each
// level has its own instructions.
#define KVTIER_NUMBER_PLANES(TARGET, DEPOSIT)                               \
    TARGET void number_planes(PlaneReader& in, uint64_t (&planes)[4]) {     \
        uint64_t first[2];                                                  \
        std::memcpy(first, in.first, sizeof first);                         \
        in.first += kFirstPlanes;                                           \
        const uint64_t other = first[0] & first[1];                         \
        const auto n = static_cast<unsigned>(std::popcount(other));         \
        const uint64_t at = in.second.at, last = in.third.at;               \
        uint64_t low = in.second.some(at), high = low >> n % 64;            \
        if (__builtin_expect(2 * n > 57, 0)) {                              \
            low = in.second.all(at), high = in.second.all(at + n);          \
        }                                                                   \
        low = DEPOSIT(low, other), high = DEPOSIT(high, other);             \
        const uint64_t rare = low & high;                                   \
        const auto m = static_cast<unsigned>(std::popcount(rare));          \
        uint64_t a = in.third.some(last), b = a >> m % 64, c = b >> m % 64; \
        if (__builtin_expect(3 * m > 57, 0)) {                              \
            a = in.third.all(last), b = in.third.all(last + m);             \
            c = in.third.all(last + 2 * m);                                 \
        }                                                                   \
        in.second.at += 2 * n, in.third.at += 3 * m;                        \
        planes[0] = first[0] ^ low ^ DEPOSIT(a, rare);                      \
        planes[1] = first[1] ^ high ^ DEPOSIT(b, rare);                     \
        planes[2] = other ^ DEPOSIT(c, rare);                               \
        planes[3] = rare;                                                   \
    }

struct RowKernels {
    // Split whole rows into codes, with one byte each or (pack) four bits, rests, and the exponents
    // without a code. Return the number of those exponents, or kNoRoom. `pack` prefetches as many
    // bytes at `ahead` as it reads, and may write rests bypassing the caches.
    size_t (*split)(const uint8_t* in, const uint8_t* ahead, size_t rows, uint8_t top, uint8_t last,
                    uint8_t* codes, uint8_t* rest, uint8_t* escapes, size_t room, bool streaming);
    size_t (*pack)(const uint8_t* in, const uint8_t* ahead, size_t rows, uint8_t top, uint8_t last,
                   uint8_t* codes, uint8_t* rest, uint8_t* escapes, size_t room, bool streaming);
    // Join rows again, bypassing the caches if `streaming`; return how many escapes were used, or
    // kNoRoom if there were too few.
    size_t (*join)(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes, size_t room,
                   uint8_t top, uint8_t last, size_t rows, uint8_t* out, bool streaming);
    size_t (*unpack)(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes, size_t room,
                     uint8_t top, uint8_t last, size_t rows, uint8_t* out, bool streaming);
};
inline constexpr size_t kNoRoom = ~size_t{0};

struct Kernels {
    RowKernels rows[kElements];
    // One, two or four streams, `rows` rows of lanes.
    void (*encode)(Encoder* const* streams, size_t count, size_t rows);
    void (*decode)(Decoder* const* streams, size_t count, size_t rows);
    // From frequencies with the sum 256.
    void (*table)(const uint8_t* frequencies, DecodeTable& table);
    // Adds to counts[255 - c] the number of codes c in these rows, at most kCountedRows rows.
    void (*count)(const uint8_t* codes, size_t rows, uint32_t* counts);
    // The codes of whole rows to planes, and back; false if bits or escapes are missing.
    void (*pack_planes)(PlaneWriter& to, const uint8_t* codes, size_t rows);
    bool (*unpack_planes)(PlaneReader& from, uint8_t* codes, size_t rows);
    // The lines of whole rows of bf16 in planes, two for each. May be null.
    bool (*digest_planes)(PlaneReader& from, const uint8_t* rest, const LentDigest& to);
};
inline constexpr size_t kCountedRows = 32;
void count_plain(const uint8_t* codes, size_t rows, uint32_t* counts);
void pack_planes_plain(PlaneWriter& to, const uint8_t* codes, size_t rows);
bool unpack_planes_plain(PlaneReader& from, uint8_t* codes, size_t rows);

// The kernels of the chosen level.
const Kernels& kernels();
void make_table(const uint8_t* frequencies, size_t symbols, EncodeTable& table);

// For loops that are compiled for several levels.
#define KVTIER_LOOP inline __attribute__((always_inline))

// Declares NAME: NAME<loop>::run is the loop, compiled for a target.
#define KVTIER_COMPILED(NAME, TARGET)                                                    \
    template <auto kLoop>                                                                \
    struct NAME;                                                                         \
    template <typename Result, typename... Arguments, Result (*kLoop)(Arguments...)>     \
    struct NAME<kLoop> {                                                                 \
        TARGET static Result run(Arguments... arguments) { return kLoop(arguments...); } \
    };

#if KVTIER_X86
extern const Kernels kKernelsAvx2, kKernelsVbmi;

// The entry of the chosen level.
#define KVTIER_LEVELS(plain, avx2, vbmi) of_level(plain, avx2, vbmi)
template <typename Set>
const Set& of_level(const Set& plain, const Set& avx2, const Set& vbmi) {
    switch (codec_choice().level()) {
        case Level::kVbmi:
            return vbmi;
        case Level::kAvx2:
            return avx2;
        default:
            return plain;
    }
}
#else
#define KVTIER_LEVELS(plain, avx2, vbmi) (plain)
#endif

}  // namespace kvtier::codec
