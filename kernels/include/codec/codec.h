// Encoding parts of blocks and decoding them: plain functions for any thread, no Python, no locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/lossless.h"
#include "cpu.h"

namespace kvtier::codec {

// As frames number them; 3 is none of ours.
enum class Codec : uint8_t {
    kRaw = 0,
    kFix4 = 1,
    kR32 = 2,
    kQ8 = 4,
    kQ4 = 5,
    kQ2 = 6,
    kEcsq = 7,
    kCachegen = 8,
    kFp8 = 9
};
// Whether a codec wants to be told of a part's channels.
constexpr bool calibrated(Codec codec) {
    return codec == Codec::kEcsq || codec == Codec::kCachegen;
}
struct Channels;  // calibration.h

// How a part's elements lie, for codecs that look at channels: matrices of so many rows, a token
// each. Without rows it is not known.
struct Grid {
    uint32_t rows = 0, channels = 0;
    uint32_t head = 0;      // channels, of which a row has whole heads
    bool by_token = false;  // groups are a token's channels; else a channel's tokens
};

// One part: its bytes as they lie in memory, its encoded bytes, and by which codec they are.
struct Encoded {
    const uint8_t* raw;
    size_t raw_bytes;
    Codec codec;   // filled in
    size_t bytes;  // filled in
    Grid grid = {};
    // For codecs that are calibrated; without channels a part is raw.
    const Channels* channels = nullptr;
    bool heads_first = false;  // each head's tokens follow one another; else each token's heads
    uint32_t position = 0;     // of the first token
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

// The most that a part of so many bytes takes: what does not shrink is kept as it is.
constexpr size_t bound(size_t raw_bytes) { return raw_bytes; }

// Writes the parts one after the other and returns how many bytes they take; `out` has room for the
// bounds of all. A part that does not get smaller is written raw. The same bytes on every
// processor.
size_t encode(Codec codec, Element element, std::span<Encoded> parts, uint8_t* out);

// Writes each part's bytes where it says. Returns the number of parts; less if a part is damaged or
// none of ours: its place in the list. Never reads or writes outside of what the parts say.
size_t decode(Element element, std::span<const Decoded> parts);

// --- the kernels ---------------------------------------------------------------------------------

struct alignas(64) EncodeTable {
    uint32_t reciprocal[kSymbolsMost];
    uint32_t packed[kSymbolsMost];  // frequency, bias << 9, shift << 20
    // The same as words that one shuffle holds all of, and as the state that is too full.
    uint16_t gain[kSymbolsMost];    // 256 - frequency
    uint16_t mended[kSymbolsMost];  // shift, bias << kShiftBits
    uint32_t fill[kSymbolsMost];    // frequency << 23
};
inline constexpr unsigned kShiftBits = 5;
// What each level's decoder looks up; each fills in its own.
struct alignas(64) DecodeTable {
    uint8_t symbol[kScale + 64];    // of each slot; what lies behind means nothing
    uint32_t packed[kSymbolsMost];  // frequency, start << 16
    uint32_t slot[kScale];          // symbol, frequency << 8, slot - start << 16
    // A slot's symbol is how many of these are less than it, both as signed bytes; in fours.
    alignas(32) uint8_t below[kSymbolsMost][32];
    uint8_t frequency[kSymbolsMost], start[kSymbolsMost];
    size_t fours;
};

// A stream on its way in, backwards: codes and words end where these point.
struct alignas(64) Encoder {
    uint32_t state[kLanes];
    const uint8_t* codes;
    uint16_t* words;
    const EncodeTable* table;
    const uint8_t*
        next;  // what is read after this, asked for meanwhile: so many bytes for 32 codes
    size_t next_step;
};
struct alignas(64) Decoder {
    uint32_t state[kLanes];
    uint8_t* codes;
    const uint8_t* words;  // 16 bits each, at any address
    const DecodeTable* table;
    const uint8_t* next;
    size_t next_step;
};
// Streams whose latencies hide each other: on their way out, and in.
inline constexpr size_t kSideBySide = 4, kInTogether = 2;
// How far ahead of four streams their bytes are asked for: further ahead, what is asked for pushes
// out what was.
inline constexpr size_t kWordsAhead = 128, kRestAhead = 512;
inline constexpr size_t kWordSlack = 32;  // words that may be read past the last one, or written
                                          // before the first

struct RowKernels {
    // Codes of whole rows, a byte each or (pack) four bits, their rests, and the exponents that are
    // no code. Returns how many those are, or kNoRoom. Packing asks for as much at `ahead` as it
    // reads, and may write rests past the caches.
    size_t (*split)(const uint8_t* in, const uint8_t* ahead, size_t rows, uint8_t top, uint8_t last,
                    uint8_t* codes, uint8_t* rest, uint8_t* escapes, size_t room, bool past);
    size_t (*pack)(const uint8_t* in, const uint8_t* ahead, size_t rows, uint8_t top, uint8_t last,
                   uint8_t* codes, uint8_t* rest, uint8_t* escapes, size_t room, bool past);
    // And back, past the caches if wanted; returns how many escapes were used, or kNoRoom if there
    // were not enough.
    size_t (*join)(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes, size_t room,
                   uint8_t top, uint8_t last, size_t rows, uint8_t* out, bool past);
    size_t (*unpack)(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes, size_t room,
                     uint8_t top, uint8_t last, size_t rows, uint8_t* out, bool past);
};
inline constexpr size_t kNoRoom = ~size_t{0};

struct Kernels {
    RowKernels rows[kElements];
    // One, two or four streams by so many rows of lanes.
    void (*encode)(Encoder* const* streams, size_t count, size_t rows);
    void (*decode)(Decoder* const* streams, size_t count, size_t rows);
    // From frequencies that sum to 256.
    void (*table)(const uint8_t* frequencies, DecodeTable& table);
    // Adds to counts[255 - c] how often a code c is in rows of them, at most kCountedRows.
    void (*count)(const uint8_t* codes, size_t rows, uint32_t* counts);
};
inline constexpr size_t kCountedRows = 32;
void count_plain(const uint8_t* codes, size_t rows, uint32_t* counts);

// Those of the level that is chosen.
const Kernels& kernels();
void make_table(const uint8_t* frequencies, size_t symbols, EncodeTable& table);

#if KVTIER_X86
extern const Kernels kKernelsAvx2, kKernelsVbmi;

// That of the level that is chosen.
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
#endif

}  // namespace kvtier::codec
