// The arithmetic of the lossless codecs, for every compiler: tests compare the CPU's kernels with
// it bit by bit, and a GPU's kernels include it.
//
// An element is rotated left by one bit, so that its exponent comes first, then its mantissa, then
// its sign; the last two are its "rest". Elements are stored in rows of 64; the last row is filled
// up with the element of exponent `top` and rest 0. The rests of a row: their whole bytes as planes
// of 64 bytes, lowest byte first; then the remaining upper bits, four as a plane of 32 bytes
// (element i in the low half of byte i, element 32 + i in the high half), three as planes of one
// bit, lowest bit first.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KVTIER_HD __host__ __device__ __attribute__((always_inline))
#else
#define KVTIER_HD
#endif

namespace kvtier::codec {

enum class Element : uint8_t { kBf16 = 0, kFp16 = 1, kFp32 = 2, kE4m3 = 3, kE5m2 = 4 };
inline constexpr size_t kElements = 5;

inline constexpr size_t kRow = 64;  // elements
inline constexpr size_t kRowCodes = kRow / 2;
inline constexpr unsigned kEscape4 = 15;  // the code of exponents outside of fix4's window

inline constexpr size_t kLanes = 32;
inline constexpr size_t kSymbolsMost = 32;
inline constexpr size_t kSymbolsLeast = 2;  // the last one is the escape
inline constexpr uint32_t kStateLeast = 1u << 15;
inline constexpr uint32_t kStateEnd = 1u << 31;
inline constexpr unsigned kScaleBits = 8;
inline constexpr uint32_t kScale = 1u << kScaleBits;
inline constexpr size_t kStreamRows = 512;  // 32,768 elements: the states cost 0.03 bits each

// The positions of the numbers in an encoded part; see docs/formats.md.
inline constexpr size_t kElementAt = 0, kTopAt = 1, kSymbolsAt = 2, kCountAt = 4;
inline constexpr size_t kFix4Header = 8;
inline constexpr size_t kFrequenciesAt = 8;
inline constexpr size_t kR32Header = kFrequenciesAt + kSymbolsMost;
inline constexpr size_t kStreamEntry = 8;  // the words and escapes of a stream, four bytes each
inline constexpr size_t kStatesBytes = 4 * kLanes;

template <Element kIs>
struct Form;
template <>
struct Form<Element::kBf16> {
    using Bits = uint16_t;
    static constexpr unsigned kExponentBits = 8;
};
template <>
struct Form<Element::kFp16> {
    using Bits = uint16_t;
    static constexpr unsigned kExponentBits = 5;
};
template <>
struct Form<Element::kFp32> {
    using Bits = uint32_t;
    static constexpr unsigned kExponentBits = 8;
};
template <>
struct Form<Element::kE4m3> {
    using Bits = uint8_t;
    static constexpr unsigned kExponentBits = 4;
};
template <>
struct Form<Element::kE5m2> {
    using Bits = uint8_t;
    static constexpr unsigned kExponentBits = 5;
};

template <Element kIs>
inline constexpr size_t kBytes = sizeof(typename Form<kIs>::Bits);
template <Element kIs>
inline constexpr unsigned kRestBits = 8 * kBytes<kIs> - Form<kIs>::kExponentBits;
template <Element kIs>
inline constexpr size_t kRestRow = kRow * kRestBits<kIs> / 8;

template <Element kIs>
KVTIER_HD inline uint32_t exponent_of(typename Form<kIs>::Bits bits) {
    constexpr uint32_t mask = (1u << Form<kIs>::kExponentBits) - 1;
    return (static_cast<uint32_t>(bits) >> (kRestBits<kIs> - 1)) & mask;
}

template <Element kIs>
KVTIER_HD inline uint32_t rest_of(typename Form<kIs>::Bits bits) {
    constexpr uint32_t mask = (1u << kRestBits<kIs>)-1;
    const uint32_t wide = bits;
    return ((wide << 1) | (wide >> (8 * kBytes<kIs> - 1))) & mask;
}

template <Element kIs>
KVTIER_HD inline typename Form<kIs>::Bits element_of(uint32_t exponent, uint32_t rest) {
    constexpr uint32_t mask = (1u << Form<kIs>::kExponentBits) - 1;
    const uint32_t low = ((exponent & mask) << (kRestBits<kIs> - 1)) | (rest >> 1);
    const uint32_t sign = (rest & 1) << (8 * kBytes<kIs> - 1);
    return static_cast<typename Form<kIs>::Bits>(low | sign);
}

// Writes the rest of element i into a row whose bits are still zero.
template <Element kIs>
KVTIER_HD inline void put_rest(uint8_t* row, size_t i, uint32_t rest) {
    constexpr size_t whole = kRestBits<kIs> / 8;
    if constexpr (whole != 0) {
        for (size_t plane = 0; plane < whole; plane++, rest >>= 8) {
            row[kRow * plane + i] = static_cast<uint8_t>(rest);
        }
    }
    row += kRow * whole;
    if constexpr (kRestBits<kIs> % 8 == 4) {
        row[i % 32] |= static_cast<uint8_t>(rest << (i / 32 * 4));
    } else if constexpr (kRestBits<kIs> % 8 == 3) {
        for (size_t bit = 0; bit < 3; bit++) {
            row[8 * bit + i / 8] |= static_cast<uint8_t>(((rest >> bit) & 1) << (i % 8));
        }
    }
}

template <Element kIs>
KVTIER_HD inline uint32_t get_rest(const uint8_t* row, size_t i) {
    constexpr size_t whole = kRestBits<kIs> / 8;
    uint32_t rest = 0;
    if constexpr (whole != 0) {
        for (size_t plane = 0; plane < whole; plane++) {
            rest |= static_cast<uint32_t>(row[kRow * plane + i]) << (8 * plane);
        }
    }
    row += kRow * whole;
    if constexpr (kRestBits<kIs> % 8 == 4) {
        rest |= ((row[i % 32] >> (i / 32 * 4)) & 15u) << (8 * whole);
    } else if constexpr (kRestBits<kIs> % 8 == 3) {
        for (size_t bit = 0; bit < 3; bit++) {
            rest |= ((row[8 * bit + i / 8] >> (i % 8)) & 1u) << (8 * whole + bit);
        }
    }
    return rest;
}

// The distance of an exponent below the top; `last`, an escape, if it is larger or negative.
KVTIER_HD inline uint32_t code_of(uint32_t exponent, uint32_t top, uint32_t last) {
    const uint32_t below = (top - exponent) & 0xFF;
    return below < last ? below : last;
}

// Which rows are sampled to count exponents, and how many: all, or scattered ones (by the golden
// ratio), because rows at equal distances could all belong to the same head.
inline constexpr size_t kSampleMost = 1024;
KVTIER_HD inline size_t sampled_rows(size_t rows, size_t least, size_t one_in) {
    size_t wanted = rows / one_in > least ? rows / one_in : least;
    if (wanted > kSampleMost) wanted = kSampleMost;
    return wanted < rows ? wanted : rows;
}
KVTIER_HD inline size_t sampled_row(size_t i, size_t sampled, size_t rows) {
    if (sampled == rows) return i;
    return static_cast<size_t>(((i * 0x9E3779B9ull & 0xFFFFFFFFull) * rows) >> 32);
}
inline constexpr size_t kFix4SampleLeast = 8, kFix4SampleOneIn = 64;
inline constexpr size_t kR32SampleLeast = 32, kR32SampleOneIn = 16;

KVTIER_HD inline bool none_of_8(const uint32_t* counts) {
    uint32_t any = 0;
    for (uint32_t i = 0; i < 8; i++) any |= counts[i];
    return any == 0;
}

// The top of the window with `width` exponents that contains most counts: the lowest such top, or
// the one above it if that contains as many, because uncounted exponents may be slightly larger.
KVTIER_HD inline uint32_t best_top(const uint32_t* counts, uint32_t width) {
    uint64_t sum = 0, best = 0;
    uint32_t first = 0, end = 256, top = 0;
    while (first < 248 && none_of_8(counts + first)) first += 8;
    while (first < 255 && counts[first] == 0) first++;
    while (end > first + 8 && none_of_8(counts + end - 8)) end -= 8;
    while (end > first + 1 && counts[end - 1] == 0) end--;
    for (uint32_t at = first; at < end; at++) {
        sum += counts[at];
        if (at >= width) sum -= counts[at - width];
        if (sum > best) {
            best = sum;
            top = at;
        }
    }
    if (top == 255) return top;
    const uint64_t above =
        best + counts[top + 1] - (top + 1 >= width ? counts[top + 1 - width] : 0);
    return above == best ? top + 1 : top;
}

inline constexpr uint32_t kRareOneIn = 1024;

// The frequencies of a part's exponents, as r32 writes them.
struct Frequencies {
    uint32_t top = 0, symbols = 0;
    uint8_t of[kSymbolsMost] = {};  // their sum is 256
};

// From counts, of which at least one is not zero. Each symbol gets at least 1, so that uncounted
// ones can be encoded; the others get their rounded share. A surplus or deficit is removed one at a
// time where that costs least or saves most.
KVTIER_HD inline Frequencies frequencies_of(const uint32_t* counts) {
    Frequencies found;
    const uint32_t width = kSymbolsMost - 1;
    uint32_t high = best_top(counts, width);
    uint32_t low = high >= width - 1 ? high - (width - 1) : 0;
    uint64_t total = 0, inside = 0;
    for (uint32_t at = 0; at < 256; at++) total += counts[at];
    // Narrows the window: the least share of a symbol slows others by 0.0056 bits, an escape by 8.
    while (high > low && uint64_t{counts[high]} * kRareOneIn < total) high--;
    while (low < high && uint64_t{counts[low]} * kRareOneIn < total) low++;
    found.top = high;
    found.symbols = high - low + 2;
    uint64_t hits[kSymbolsMost] = {};
    for (uint32_t at = low; at <= high; at++) {
        hits[high - at] = counts[at];
        inside += counts[at];
    }
    hits[found.symbols - 1] = total - inside;
    uint32_t share[kSymbolsMost] = {};
    uint32_t sum = 0;
    for (uint32_t i = 0; i < found.symbols; i++) {
        share[i] = static_cast<uint32_t>((hits[i] * kScale + total / 2) / total);
        if (share[i] == 0) share[i] = 1;
        sum += share[i];
    }
    for (; sum > kScale; sum--) {
        uint32_t least = kSymbolsMost;
        for (uint32_t i = 0; i < found.symbols; i++) {
            if (share[i] > 1 && (least == kSymbolsMost || hits[i] * (2 * share[least] - 1) <
                                                              hits[least] * (2 * share[i] - 1))) {
                least = i;
            }
        }
        share[least]--;
    }
    for (; sum < kScale; sum++) {
        uint32_t most = 0;
        for (uint32_t i = 1; i < found.symbols; i++) {
            if (hits[i] * (2 * share[most] + 1) > hits[most] * (2 * share[i] + 1)) most = i;
        }
        share[most]++;
    }
    for (uint32_t i = 0; i < found.symbols; i++) found.of[i] = static_cast<uint8_t>(share[i]);
    return found;
}

// A symbol in the form that the encoder needs: x / frequency is (x * reciprocal >> 32) >> shift for
// every state (Alverson's exact reciprocals, as in ryg_rans). For frequency 1 the result is one
// less, which `bias` corrects.
struct Symbol {
    uint32_t reciprocal, frequency, bias, shift;
};

KVTIER_HD inline Symbol symbol_of(uint32_t frequency, uint32_t start) {
    if (frequency < 2) return {0xFFFFFFFFu, frequency, start + kScale - 1, 0};
    uint32_t shift = 0;
    while ((1u << shift) < frequency) shift++;
    const uint64_t wide = ((1ull << (shift + 31)) + frequency - 1) / frequency;
    return {static_cast<uint32_t>(wide), frequency, start, shift - 1};
}

// True if the encoder must write a word of the state before this symbol.
KVTIER_HD inline bool needs_word(uint32_t state, uint32_t frequency) {
    return state >> 23 >= frequency;
}

KVTIER_HD inline uint32_t state_after_encode(uint32_t state, const Symbol& symbol) {
    const uint32_t whole =
        static_cast<uint32_t>((static_cast<uint64_t>(state) * symbol.reciprocal) >> 32) >>
        symbol.shift;
    return state + symbol.bias + whole * (kScale - symbol.frequency);
}

// The state before a symbol was encoded, except for a word; `slot` is its lowest 8 bits.
KVTIER_HD inline uint32_t state_after_decode(uint32_t state, uint32_t frequency,
                                             uint32_t from_start) {
    return frequency * (state >> kScaleBits) + from_start;
}

KVTIER_HD inline size_t rows_of(size_t elements) { return (elements + kRow - 1) / kRow; }
KVTIER_HD inline size_t streams_of(size_t rows) { return (rows + kStreamRows - 1) / kStreamRows; }

// The maximum number of words in a stream: no symbol needs more than 8 bits, and a state that wrote
// a word is at least 2^23, so it writes none for the next symbol.
KVTIER_HD constexpr size_t words_most(size_t symbols) { return symbols / 2 + kLanes; }
inline constexpr size_t kStreamWords = words_most(kStreamRows * kRow);

}  // namespace kvtier::codec
