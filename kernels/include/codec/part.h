// What the host and the kernels of a device tell each other about the parts of a batch. The host
// divides parts into units; a warp processes a unit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::cuda {

// Addresses are device addresses. A part's bytes are aligned to the size of its element and fewer
// than 2^31; its encoded bytes are unaligned.
struct Part {
    uint64_t raw, raw_bytes;
    uint64_t text, text_bytes;  // decoding: of this part; encoding: of its whole payload
    uint64_t scratch;           // aligned to 8 bytes; each codec defines its use and size
    uint64_t known;             // the part's content of a profile, or 0
    uint32_t element;
    uint32_t kept;          // stored raw
    uint32_t unit, units;   // the first unit, and the number of units
    uint32_t first, parts;  // encoding: the index of the payload's first part, and their number
    uint32_t bits;          // of codes, with flags: see codec::fixed_form
    uint32_t rows, channels, head, by_token;  // a grid
    uint32_t heads_first, position;
    uint32_t reserved;
};

// The encoded size of a unit: in bytes, but words and escapes are counts.
struct Measure {
    uint32_t words, escapes;
    uint64_t bytes;
};

struct Result {
    uint64_t bytes, offset;  // encoding: the size, and the position in the payload
    uint32_t kept, bad;
};

static_assert(sizeof(Part) == 104 && sizeof(Measure) == 16 && sizeof(Result) == 24);

}  // namespace kvtier::cuda
