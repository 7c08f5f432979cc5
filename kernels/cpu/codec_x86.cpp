// The lossless codecs for AVX2 and for AVX-512 with VBMI, whose byte shuffles hold whole tables.
#include "cpu.h"

#if KVTIER_X86
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>

#include "codec/codec.h"
#include "codec/parts.h"
#include "xxh3_x86.h"

namespace kvtier::codec {
namespace {

#define WIDE KVTIER_VBMI KVTIER_LOOP
#define HALF KVTIER_AVX2 KVTIER_LOOP

// An index byte for each of 64 positions, in the form that shuffles need.
template <typename Number>
constexpr std::array<uint8_t, 64> places(Number number) {
    std::array<uint8_t, 64> found{};
    for (size_t i = 0; i < 64; i++) found[i] = static_cast<uint8_t>(number(i));
    return found;
}

// Prefetches the lines of a row.
template <Element kIs>
KVTIER_LOOP void fetch_row(const uint8_t* at) {
    for (size_t i = 0; i < kRow * kBytes<kIs>; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(at + i), _MM_HINT_T1);
    }
}

KVTIER_LOOP void fetch(const uint8_t*& at, size_t step) {
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
    at += step;
}

// Prefetches the words after the next ones; an address after the end of the stream is harmless.
KVTIER_LOOP void prefetch_words(const uint8_t* words) {
    _mm_prefetch(reinterpret_cast<const char*>(words + kWordsAhead), _MM_HINT_T0);
}

// --- AVX-512 -------------------------------------------------------------------------------------

// Writes the elements of a row into the caches, or bypasses them.
template <bool kStreaming>
WIDE void give(uint8_t* at, __m512i bytes) {
    if constexpr (kStreaming) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(at), bytes);
    } else {
        _mm512_storeu_si512(at, bytes);
    }
}

WIDE __m512i line(const void* at) { return _mm512_loadu_si512(at); }
HALF __m256i half(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
WIDE __m512i line(const std::array<uint8_t, 64>& at) { return _mm512_loadu_si512(at.data()); }

constexpr auto kInOrder = places([](size_t i) { return i; });
constexpr auto kEven = places([](size_t i) { return 2 * i; });
constexpr auto kOdd = places([](size_t i) { return 2 * i + 1; });
constexpr auto kFirstPairs = places([](size_t i) { return i / 2 + i % 2 * 64; });
constexpr auto kLastPairs = places([](size_t i) { return 32 + i / 2 + i % 2 * 64; });
constexpr auto kBytes01 = places([](size_t i) { return i % 32 * 4 + i / 32; });
constexpr auto kBytes23 = places([](size_t i) { return i % 32 * 4 + i / 32 + 2; });
constexpr auto kFirstFours = places([](size_t i) { return i / 4 + i % 4 * 32; });
constexpr auto kLastFours = places([](size_t i) { return 16 + i / 4 + i % 4 * 32; });

WIDE void put_planes(__m512i bits, uint8_t* to) {
    for (int j = 0; j < 3; j++) {
        const uint64_t plane =
            _mm512_test_epi8_mask(bits, _mm512_set1_epi8(static_cast<char>(1 << j)));
        std::memcpy(to + 8 * j, &plane, 8);
    }
}

WIDE __m512i get_planes(const uint8_t* from) {
    __m512i bits = _mm512_setzero_si512();
    for (int j = 0; j < 3; j++) {
        uint64_t plane;
        std::memcpy(&plane, from + 8 * j, 8);
        bits = _mm512_or_si512(bits, _mm512_maskz_set1_epi8(plane, static_cast<char>(1 << j)));
    }
    return bits;
}

WIDE __m256i nibbles(__m512i bytes) {
    return _mm256_or_si256(_mm512_castsi512_si256(bytes),
                           _mm256_slli_epi16(_mm512_extracti64x4_epi64(bytes, 1), 4));
}

WIDE __m512i from_nibbles(const uint8_t* from) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m512i apart =
        _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    return _mm512_and_si512(apart, _mm512_set1_epi8(15));
}

// Separates the exponents and the rest of a row; and joins them again.
template <Element kIs>
struct Row512;

struct Pairs512 {
    static WIDE void split(const uint8_t* in, __m512i& upper, __m512i& lower) {
        const __m512i a = line(in), b = line(in + 64);
        const __m512i turned_a = _mm512_shldi_epi16(a, a, 1),
                      turned_b = _mm512_shldi_epi16(b, b, 1);
        upper = _mm512_permutex2var_epi8(turned_a, line(kOdd), turned_b);
        lower = _mm512_permutex2var_epi8(turned_a, line(kEven), turned_b);
    }
    template <bool kStreaming>
    static WIDE void join(__m512i upper, __m512i lower, uint8_t* out) {
        const __m512i a = _mm512_permutex2var_epi8(lower, line(kFirstPairs), upper);
        const __m512i b = _mm512_permutex2var_epi8(lower, line(kLastPairs), upper);
        give<kStreaming>(out, _mm512_shrdi_epi16(a, a, 1));
        give<kStreaming>(out + 64, _mm512_shrdi_epi16(b, b, 1));
    }
};

template <>
struct Row512<Element::kBf16> {
    static WIDE __m512i split(const uint8_t* in, uint8_t* rest) {
        __m512i upper, lower;
        Pairs512::split(in, upper, lower);
        _mm512_storeu_si512(rest, lower);
        return upper;
    }
    template <bool kStreaming>
    static WIDE void join(__m512i exponents, const uint8_t* rest, uint8_t* out) {
        Pairs512::join<kStreaming>(exponents, line(rest), out);
    }
};

// Writes the rests of bf16 at any address, past the caches: incomplete lines wait for the next row.
struct Streaming512 {
    uint8_t* at;
    size_t phase;  // offset of the rows within a line
    __mmask64 ours;
    __m512i turn, before;

    explicit WIDE Streaming512(uint8_t* rest)
        : at(rest - reinterpret_cast<uintptr_t>(rest) % 64),
          phase(static_cast<size_t>(rest - at)),
          ours(~0ull << phase),
          turn(_mm512_add_epi8(line(kInOrder), _mm512_set1_epi8(static_cast<char>(64 - phase)))),
          before(_mm512_setzero_si512()) {}
    WIDE __m512i split(const uint8_t* in) {
        __m512i upper, lower;
        Pairs512::split(in, upper, lower);
        const __m512i bytes = _mm512_permutex2var_epi8(before, turn, lower);
        if (ours == ~0ull) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(at), bytes);
        } else {
            _mm512_mask_storeu_epi8(at, ours, bytes);
            ours = ~0ull;
        }
        before = lower;
        at += 64;
        return upper;
    }
    WIDE void finish() const {
        const __m512i bytes = _mm512_permutex2var_epi8(before, turn, before);
        _mm512_mask_storeu_epi8(at, (1ull << phase) - 1, bytes);
    }
};

template <>
struct Row512<Element::kFp16> {
    static WIDE __m512i split(const uint8_t* in, uint8_t* rest) {
        __m512i upper, lower;
        Pairs512::split(in, upper, lower);
        _mm512_storeu_si512(rest, lower);
        put_planes(upper, rest + 64);
        return _mm512_and_si512(_mm512_srli_epi16(upper, 3), _mm512_set1_epi8(0x1F));
    }
    template <bool kStreaming>
    static WIDE void join(__m512i exponents, const uint8_t* rest, uint8_t* out) {
        const __m512i moved =
            _mm512_and_si512(_mm512_slli_epi16(exponents, 3), _mm512_set1_epi8(-8));
        Pairs512::join<kStreaming>(_mm512_or_si512(moved, get_planes(rest + 64)), line(rest), out);
    }
};

template <>
struct Row512<Element::kFp32> {
    static WIDE __m512i split(const uint8_t* in, uint8_t* rest) {
        __m512i turned[4];
        for (int i = 0; i < 4; i++) turned[i] = _mm512_rol_epi32(line(in + 64 * i), 1);
        const __m512i a01 = _mm512_permutex2var_epi8(turned[0], line(kBytes01), turned[1]);
        const __m512i a23 = _mm512_permutex2var_epi8(turned[0], line(kBytes23), turned[1]);
        const __m512i b01 = _mm512_permutex2var_epi8(turned[2], line(kBytes01), turned[3]);
        const __m512i b23 = _mm512_permutex2var_epi8(turned[2], line(kBytes23), turned[3]);
        _mm512_storeu_si512(rest, _mm512_shuffle_i64x2(a01, b01, 0x44));
        _mm512_storeu_si512(rest + 64, _mm512_shuffle_i64x2(a01, b01, 0xEE));
        _mm512_storeu_si512(rest + 128, _mm512_shuffle_i64x2(a23, b23, 0x44));
        return _mm512_shuffle_i64x2(a23, b23, 0xEE);
    }
    template <bool kStreaming>
    static WIDE void join(__m512i exponents, const uint8_t* rest, uint8_t* out) {
        const __m512i p0 = line(rest), p1 = line(rest + 64), p2 = line(rest + 128);
        const __m512i a01 = _mm512_shuffle_i64x2(p0, p1, 0x44);
        const __m512i a23 = _mm512_shuffle_i64x2(p2, exponents, 0x44);
        const __m512i b01 = _mm512_shuffle_i64x2(p0, p1, 0xEE);
        const __m512i b23 = _mm512_shuffle_i64x2(p2, exponents, 0xEE);
        const __m512i turned[4] = {
            _mm512_permutex2var_epi8(a01, line(kFirstFours), a23),
            _mm512_permutex2var_epi8(a01, line(kLastFours), a23),
            _mm512_permutex2var_epi8(b01, line(kFirstFours), b23),
            _mm512_permutex2var_epi8(b01, line(kLastFours), b23),
        };
        for (int i = 0; i < 4; i++) give<kStreaming>(out + 64 * i, _mm512_ror_epi32(turned[i], 1));
    }
};

struct Bytes512 {
    static WIDE __m512i turned(const uint8_t* in) {
        const __m512i bytes = line(in);
        const __m512i up = _mm512_andnot_si512(_mm512_set1_epi8(1), _mm512_add_epi8(bytes, bytes));
        return _mm512_or_si512(up,
                               _mm512_and_si512(_mm512_srli_epi16(bytes, 7), _mm512_set1_epi8(1)));
    }
    template <bool kStreaming>
    static WIDE void put(__m512i turned, uint8_t* out) {
        const __m512i down = _mm512_and_si512(_mm512_srli_epi16(turned, 1), _mm512_set1_epi8(0x7F));
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(turned, 7), _mm512_set1_epi8(-128));
        give<kStreaming>(out, _mm512_or_si512(down, sign));
    }
};

template <>
struct Row512<Element::kE4m3> {
    static WIDE __m512i split(const uint8_t* in, uint8_t* rest) {
        const __m512i turned = Bytes512::turned(in);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest),
                            nibbles(_mm512_and_si512(turned, _mm512_set1_epi8(15))));
        return _mm512_and_si512(_mm512_srli_epi16(turned, 4), _mm512_set1_epi8(15));
    }
    template <bool kStreaming>
    static WIDE void join(__m512i exponents, const uint8_t* rest, uint8_t* out) {
        const __m512i moved =
            _mm512_and_si512(_mm512_slli_epi16(exponents, 4), _mm512_set1_epi8(-16));
        Bytes512::put<kStreaming>(_mm512_or_si512(moved, from_nibbles(rest)), out);
    }
};

template <>
struct Row512<Element::kE5m2> {
    static WIDE __m512i split(const uint8_t* in, uint8_t* rest) {
        const __m512i turned = Bytes512::turned(in);
        put_planes(turned, rest);
        return _mm512_and_si512(_mm512_srli_epi16(turned, 3), _mm512_set1_epi8(0x1F));
    }
    template <bool kStreaming>
    static WIDE void join(__m512i exponents, const uint8_t* rest, uint8_t* out) {
        const __m512i moved =
            _mm512_and_si512(_mm512_slli_epi16(exponents, 3), _mm512_set1_epi8(-8));
        Bytes512::put<kStreaming>(_mm512_or_si512(moved, get_planes(rest)), out);
    }
};

template <Element kIs, bool kNibbles, bool kStreaming = false>
KVTIER_VBMI size_t split512(const uint8_t* in, const uint8_t* ahead, size_t rows, uint8_t top,
                            uint8_t last, uint8_t* codes, uint8_t* rest, uint8_t* escapes,
                            size_t room, bool) {
    const __m512i tops = _mm512_set1_epi8(static_cast<char>(top));
    const __m512i lasts = _mm512_set1_epi8(static_cast<char>(last));
    Streaming512 lines(rest);
    size_t used = 0;
    for (size_t row = 0; row < rows; row++) {
        if constexpr (kNibbles) fetch_row<kIs>(ahead);
        __m512i exponents;
        if constexpr (kStreaming) {
            exponents = lines.split(in);
        } else {
            exponents = Row512<kIs>::split(in, rest);
        }
        const __m512i found = _mm512_min_epu8(_mm512_sub_epi8(tops, exponents), lasts);
        const __mmask64 escaped = _mm512_cmpeq_epi8_mask(found, lasts);
        if constexpr (kNibbles) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), nibbles(found));
        } else {
            _mm512_storeu_si512(codes, found);
        }
        if (escaped != 0) {
            const auto count = static_cast<size_t>(std::popcount(escaped));
            if (count > room - used) return kNoRoom;
            // Compressed in a register first: compressing stores are slow on some processors.
            _mm512_mask_storeu_epi8(escapes + used, _bzhi_u64(~0ull, static_cast<unsigned>(count)),
                                    _mm512_maskz_compress_epi8(escaped, exponents));
            used += count;
        }
        in += kRow * kBytes<kIs>, ahead += kRow * kBytes<kIs>;
        rest += kRestRow<kIs>, codes += kNibbles ? kRowCodes : kRow;
    }
    if (kStreaming && rows != 0) lines.finish();
    return used;
}

KVTIER_VBMI size_t pack512(const uint8_t* in, const uint8_t* ahead, size_t rows, uint8_t top,
                           uint8_t last, uint8_t* codes, uint8_t* rest, uint8_t* escapes,
                           size_t room, bool streaming) {
    return (streaming ? split512<Element::kBf16, true, true>
                      : split512<Element::kBf16, true>)(in, ahead, rows, top, last, codes, rest,
                                                        escapes, room, streaming);
}

template <Element kIs, bool kNibbles, bool kStreaming>
KVTIER_VBMI size_t join512(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes,
                           size_t room, uint8_t top, uint8_t last, size_t rows, uint8_t* out) {
    const __m512i tops = _mm512_set1_epi8(static_cast<char>(top));
    const __m512i lasts = _mm512_set1_epi8(static_cast<char>(last));
    size_t used = 0;
    for (size_t row = 0; row < rows; row++) {
        const __m512i found = kNibbles ? from_nibbles(codes) : line(codes);
        const __mmask64 escaped = _mm512_cmpeq_epi8_mask(found, lasts);
        __m512i exponents = _mm512_sub_epi8(tops, found);
        if (escaped != 0) {
            const auto count = static_cast<size_t>(std::popcount(escaped));
            if (count > room - used) return kNoRoom;
            const __m512i here = _mm512_maskz_loadu_epi8(
                _bzhi_u64(~0ull, static_cast<unsigned>(count)), escapes + used);
            exponents = _mm512_mask_expand_epi8(exponents, escaped, here);
            used += count;
        }
        Row512<kIs>::template join<kStreaming>(exponents, rest, out);
        out += kRow * kBytes<kIs>, rest += kRestRow<kIs>, codes += kNibbles ? kRowCodes : kRow;
    }
    return used;
}

WIDE __m512i codes16(const uint8_t* at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// The lower words of two registers of 32-bit lanes.
constexpr std::array<uint16_t, kLanes> kLowerWords = [] {
    std::array<uint16_t, kLanes> found{};
    for (size_t i = 0; i < kLanes; i++) found[i] = static_cast<uint16_t>(2 * i);
    return found;
}();

// Encodes the codes of half a row.
WIDE __m512i encoded_half(__m512i state, __m512i code, const EncodeTable& table) {
    const __mmask32 lower_words = 0x55555555;
    const __m512i reciprocal =
        _mm512_permutex2var_epi32(line(table.reciprocal), code, line(table.reciprocal + 16));
    const __m512i corrected =
        _mm512_maskz_permutexvar_epi16(lower_words, code, line(table.corrected));
    const __m512i gain = _mm512_maskz_permutexvar_epi16(lower_words, code, line(table.gain));
    const __m512i even = _mm512_mul_epu32(state, reciprocal);
    const __m512i odd =
        _mm512_mul_epu32(_mm512_srli_epi64(state, 32), _mm512_srli_epi64(reciprocal, 32));
    const __m512i high =
        _mm512_mask_shuffle_epi32(odd, 0x5555, even, static_cast<_MM_PERM_ENUM>(0xF5));
    // The instruction uses only the lowest 5 bits of the shift.
    const __m512i whole = _mm512_shrdv_epi32(high, _mm512_setzero_si512(), corrected);
    const __m512i bias = _mm512_srli_epi32(corrected, kShiftBits);
    return _mm512_add_epi32(_mm512_add_epi32(state, bias), _mm512_mullo_epi32(whole, gain));
}

// Encodes a row into its states.
WIDE void encode_row(__m512i& low, __m512i& high, const uint8_t* codes, const EncodeTable& table,
                     uint16_t*& words) {
    const __m512i code_low = codes16(codes), code_high = codes16(codes + 16);
    const __m512i fill_low =
        _mm512_permutex2var_epi32(line(table.fill), code_low, line(table.fill + 16));
    const __m512i fill_high =
        _mm512_permutex2var_epi32(line(table.fill), code_high, line(table.fill + 16));
    const __mmask16 full_low = _mm512_cmpge_epu32_mask(low, fill_low);
    const __mmask16 full_high = _mm512_cmpge_epu32_mask(high, fill_high);
    const __mmask32 full = _mm512_kunpackw(full_high, full_low);
    const auto count = static_cast<unsigned>(std::popcount(_cvtmask32_u32(full)));
    words -= count;
    const __m512i lower = _mm512_permutex2var_epi16(low, line(kLowerWords.data()), high);
    _mm512_mask_storeu_epi16(words, _bzhi_u32(~0u, count),
                             _mm512_maskz_compress_epi16(full, lower));
    low = encoded_half(_mm512_mask_srli_epi32(low, full_low, low, 16), code_low, table);
    high = encoded_half(_mm512_mask_srli_epi32(high, full_high, high, 16), code_high, table);
}

template <size_t kCount>
KVTIER_VBMI void encode512(Encoder* const* streams, size_t rows) {
    __m512i low[kCount], high[kCount];
    const uint8_t* codes[kCount];
    uint16_t* words[kCount];
    const EncodeTable* tables[kCount];
    const uint8_t* next[kCount];
    const size_t step = streams[0]->next_step;
    for (size_t s = 0; s < kCount; s++) {
        low[s] = line(streams[s]->state), high[s] = line(streams[s]->state + 16);
        codes[s] = streams[s]->codes, words[s] = streams[s]->words, tables[s] = streams[s]->table;
        next[s] = streams[s]->next;
    }
    for (size_t row = 0; row < rows; row++) {
        _Pragma("GCC unroll 4") for (size_t s = 0; s < kCount; s++) {
            fetch(next[s], step);
            codes[s] -= kLanes;
            encode_row(low[s], high[s], codes[s], *tables[s], words[s]);
        }
    }
    for (size_t s = 0; s < kCount; s++) {
        _mm512_storeu_si512(streams[s]->state, low[s]);
        _mm512_storeu_si512(streams[s]->state + 16, high[s]);
        streams[s]->codes = codes[s], streams[s]->words = words[s];
    }
}

// Decodes half a row; returns the states that need a word.
WIDE __mmask16 decode_half_row(__m512i& state, const DecodeTable& table, uint8_t* codes) {
    // Shuffles use only 7 bits of an index (5 for 32-bit words), so higher bits do no harm.
    const __m512i low =
        _mm512_permutex2var_epi8(line(table.symbol), state, line(table.symbol + 64));
    const __m512i high =
        _mm512_permutex2var_epi8(line(table.symbol + 128), state, line(table.symbol + 192));
    const __m512i code =
        _mm512_mask_blend_epi32(_mm512_test_epi32_mask(state, _mm512_set1_epi32(128)), low, high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(code));
    const __m512i packed =
        _mm512_permutex2var_epi32(line(table.packed), code, line(table.packed + 16));
    const __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(kScale - 1));
    const __m512i frequency = _mm512_and_si512(packed, _mm512_set1_epi32(0xFFFF));
    const __m512i grown = _mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, kScaleBits));
    state = _mm512_add_epi32(grown, _mm512_sub_epi32(slot, _mm512_srli_epi32(packed, 16)));
    return _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(kStateLeast));
}

// Gives the next word to each state that needs one.
WIDE __m512i refill(__m512i state, __mmask16 starved, const uint8_t*& words) {
    // One expansion of 16-bit words for both halves would cost a tenth of the speed on Zen 5.
    const __m512i next = _mm512_cvtepu16_epi32(half(words));
    words += 2 * std::popcount(starved);
    return _mm512_mask_or_epi32(state, starved, _mm512_slli_epi32(state, 16),
                                _mm512_maskz_expand_epi32(starved, next));
}

template <size_t kCount>
KVTIER_VBMI void decode512(Decoder* const* streams, size_t rows) {
    __m512i low[kCount], high[kCount];
    uint8_t* codes[kCount];
    const uint8_t* words[kCount];
    const DecodeTable* tables[kCount];
    const uint8_t* next[kCount];
    const size_t step = streams[0]->next_step;
    for (size_t s = 0; s < kCount; s++) {
        low[s] = line(streams[s]->state), high[s] = line(streams[s]->state + 16);
        codes[s] = streams[s]->codes, words[s] = streams[s]->words, tables[s] = streams[s]->table;
        next[s] = streams[s]->next;
    }
    for (size_t row = 0; row < rows; row++) {
        _Pragma("GCC unroll 4") for (size_t s = 0; s < kCount; s++) {
            fetch(next[s], step);
            prefetch_words(words[s]);
            const __mmask16 hungry_low = decode_half_row(low[s], *tables[s], codes[s]);
            const __mmask16 hungry_high = decode_half_row(high[s], *tables[s], codes[s] + 16);
            low[s] = refill(low[s], hungry_low, words[s]);
            high[s] = refill(high[s], hungry_high, words[s]);
            codes[s] += kLanes;
        }
    }
    for (size_t s = 0; s < kCount; s++) {
        _mm512_storeu_si512(streams[s]->state, low[s]);
        _mm512_storeu_si512(streams[s]->state + 16, high[s]);
        streams[s]->codes = codes[s], streams[s]->words = words[s];
    }
}

KVTIER_VBMI void table512(const uint8_t* frequencies, DecodeTable& table) {
    uint32_t start = 0;
    for (uint32_t i = 0; i < kSymbolsMost; i++) {
        table.packed[i] = frequencies[i] | start << 16;
        for (uint32_t k = 0; k < frequencies[i]; k += 64) {
            // The following symbols overwrite the excess.
            _mm512_storeu_si512(table.symbol + start + k, _mm512_set1_epi8(static_cast<char>(i)));
        }
        start += frequencies[i];
    }
}

// Counts one code at a time, because most codes of a part are close to each other.
KVTIER_VBMI void count512(const uint8_t* codes, size_t rows, uint32_t* counts) {
    constexpr unsigned kNear = 32;
    __m512i least = line(codes);
    for (size_t row = 1; row < rows; row++) {
        least = _mm512_min_epu8(least, line(codes + row * kRow));
    }
    const __m256i folded =
        _mm256_min_epu8(_mm512_castsi512_si256(least), _mm512_extracti64x4_epi64(least, 1));
    const __m128i again =
        _mm_min_epu8(_mm256_castsi256_si128(folded), _mm256_extracti128_si256(folded, 1));
    const __m128i words = _mm_min_epu8(again, _mm_srli_epi16(again, 8));
    const auto first = static_cast<unsigned>(_mm_cvtsi128_si32(_mm_minpos_epu16(words)) & 0xFFFF);
    const unsigned end = first + kNear;  // none left beyond 255
    size_t left = rows * kRow;
    for (unsigned code = first; code < end && left != 0; code++) {
        const __m512i wanted = _mm512_set1_epi8(static_cast<char>(code));
        size_t found = 0;
        for (size_t row = 0; row < rows; row++) {
            found += static_cast<size_t>(
                std::popcount(_mm512_cmpeq_epi8_mask(line(codes + row * kRow), wanted)));
        }
        counts[255 - code] += static_cast<uint32_t>(found);
        left -= found;
    }
    for (; left != 0; codes++) {
        if (*codes < end) continue;
        counts[255 - *codes]++;
        left--;
    }
}

KVTIER_NUMBER_PLANES(HALF, _pdep_u64)  // for AVX2, too

// The codes of rows; with another table, its bytes in place of codes.
struct Codes512 {
    __m512i table, one, two, four, eight;

    // In place: with the intrinsic, the compiler copies the sum before each addition.
    static WIDE void add_where(__m512i& sum, __mmask64 where, __m512i what) {
        __asm__("vpaddb %2, %0, %0 %{%1%}" : "+v"(sum) : "Yk"(where), "v"(what));
    }

    explicit WIDE Codes512(__m128i codes)
        : table(_mm512_broadcast_i32x4(codes)),
          one(_mm512_set1_epi8(1)),
          two(_mm512_set1_epi8(2)),
          four(_mm512_set1_epi8(4)),
          eight(_mm512_set1_epi8(8)) {
        // Otherwise the compiler makes them again for each row.
        __asm__("" : "+v"(one), "+v"(two), "+v"(four), "+v"(eight));
    }

    // Those of the next row, except for the elements that are `escaped`.
    WIDE __m512i next(PlaneReader& in, uint64_t& escaped) const {
        uint64_t planes[4];
        number_planes(in, planes);
        __m512i numbers = _mm512_maskz_mov_epi8(planes[0], one);
        add_where(numbers, planes[1], two);
        add_where(numbers, planes[2], four);
        add_where(numbers, planes[3], eight);
        escaped = planes[0] & planes[1] & planes[2] & planes[3];
        return _mm512_shuffle_epi8(table, numbers);
    }
};

// The codes of the next escapes at their elements. Returns false if there are too few.
WIDE bool expand_escapes(PlaneReader& in, uint64_t escaped, __m512i turn, __m512i& codes) {
    const auto count = static_cast<size_t>(std::popcount(escaped));
    if (count > in.escaped) return false;
    const __m512i here =
        _mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, static_cast<unsigned>(count)), in.escapes);
    codes = _mm512_mask_expand_epi8(codes, escaped, _mm512_xor_si512(here, turn));
    in.escapes += count, in.escaped -= count;
    return true;
}

KVTIER_VBMI bool unpack_planes512(PlaneReader& from, uint8_t* codes, size_t rows) {
    const Codes512 by(_mm_load_si128(reinterpret_cast<const __m128i*>(from.codes)));
    const __m512i as_it_is = _mm512_setzero_si512();
    PlaneReader in = from;
    for (size_t row = 0; row < rows; row++, codes += kRow) {
        fetch(in.next, 64);
        fetch(in.next, in.next_step - 64);
        uint64_t escaped;
        __m512i found = by.next(in, escaped);
        if (escaped != 0 && !expand_escapes(in, escaped, as_it_is, found)) return false;
        _mm512_storeu_si512(codes, found);
    }
    from = in;
    return from.is_sound();
}

inline constexpr size_t kTogether = kStripesPerRun / 2;  // rows between two scrambles

// Rows of bf16: what other elements do in steps, from buffer to buffer, without leaving registers.
struct Rows512 {
    Codes512 by;
    __m512i first, last, inverted, latest;
    PlaneReader in;
    const uint8_t* rest;
    uint8_t* to;
    Stripes512 digest;

    WIDE Rows512(const PlaneReader& from, const uint8_t* rests, const LentDigest& lent)
        : by(_mm_xor_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(from.codes)),
                           _mm_set1_epi8(-1))),  // an exponent is 255 minus its code
          first(line(kFirstPairs)),
          last(line(kLastPairs)),
          inverted(_mm512_set1_epi8(-1)),
          latest(inverted),
          in(from),
          rest(rests),
          to(lent.to) {
        digest.load(*lent.acc);
    }

    // Row `k` after the present one.
    template <bool kStreaming>
    WIDE bool row(size_t k, const uint8_t* secret) {
        uint64_t escaped;
        __m512i exponents = by.next(in, escaped);
        if (__builtin_expect(escaped != 0, 0) &&
            !expand_escapes(in, escaped, inverted, exponents)) {
            return false;
        }
        __m512i lower = line(rest + k * kRow);
        __asm__("" : "+v"(lower));  // otherwise it is copied through memory
        __m512i a = _mm512_permutex2var_epi8(lower, first, exponents);
        __m512i b = _mm512_permutex2var_epi8(lower, last, exponents);
        a = _mm512_shrdi_epi16(a, a, 1), b = _mm512_shrdi_epi16(b, b, 1);
        give<kStreaming>(to + 2 * k * kStripe, a);
        give<kStreaming>(to + (2 * k + 1) * kStripe, b);
        digest.add(a, secret);
        digest.add(b, secret + 8);
        latest = b;
        return true;
    }
    WIDE void put_latest(uint8_t* at) const { _mm512_storeu_si512(at, latest); }
    WIDE void skip(size_t rows) { rest += rows * kRow, to += 2 * rows * kStripe; }
};

// The loop over rows that writes and digests their lines, compiled for each width.
#define KVTIER_DIGEST_PLANES(NAME, ROWS, TARGET)                                                 \
    template <bool kStreaming>                                                                   \
    TARGET bool NAME(PlaneReader& from, const uint8_t* rest, const LentDigest& lent) {           \
        constexpr size_t kLinesAhead = 12; /* the input of kTogether rows */                     \
        const uint8_t* const scrambling = kXxh3Secret + kSecretBytes - kStripe;                  \
        ROWS rows(from, rest, lent);                                                             \
        size_t row = lent.position / 2, left = lent.lines / 2;                                   \
        while (left != 0) {                                                                      \
            if (row == 0 && left >= kTogether) {                                                 \
                for (size_t k = 0; k < kLinesAhead; k++) {                                       \
                    _mm_prefetch(reinterpret_cast<const char*>(rows.in.next + 64 * k),           \
                                 _MM_HINT_NTA);                                                  \
                }                                                                                \
                rows.in.next += kTogether * rows.in.next_step;                                   \
                _mm_prefetch(reinterpret_cast<const char*>(rows.to + kPagesAhead), _MM_HINT_T0); \
                _Pragma("GCC unroll 8") for (size_t k = 0; k < kTogether; k++) {                 \
                    if (!rows.template row<kStreaming>(k, kXxh3Secret + 16 * k)) return false;   \
                }                                                                                \
                rows.skip(kTogether);                                                            \
                rows.digest.scramble(scrambling);                                                \
                left -= kTogether;                                                               \
                continue;                                                                        \
            }                                                                                    \
            if (!rows.template row<kStreaming>(0, kXxh3Secret + 16 * row)) return false;         \
            rows.skip(1);                                                                        \
            left--;                                                                              \
            if (++row == kTogether) {                                                            \
                rows.digest.scramble(scrambling);                                                \
                row = 0;                                                                         \
            }                                                                                    \
        }                                                                                        \
        rows.digest.save(*lent.acc);                                                             \
        rows.put_latest(lent.last);                                                              \
        from = rows.in;                                                                          \
        return from.is_sound();                                                                  \
    }

KVTIER_DIGEST_PLANES(digest_planes512, Rows512, KVTIER_VBMI)

// Adds the bits of a row whose numbers have these planes; returns which elements are escapes.
HALF uint64_t add_row(PlaneWriter& out, const uint64_t (&planes)[4]) {
    const uint64_t rare = planes[3], other = planes[2] | rare;
    const uint64_t first[2] = {planes[0] | other, planes[1] | other};
    std::memcpy(out.first, first, sizeof first);
    out.first += kFirstPlanes;
    const auto n = static_cast<unsigned>(std::popcount(other));
    out.second.add(_pext_u64(~planes[0] | rare, other), n);
    out.second.add(_pext_u64(~planes[1] | rare, other), n);
    const auto m = static_cast<unsigned>(std::popcount(rare));
    const uint64_t third[3] = {planes[0], planes[1], ~planes[2]};
    for (const uint64_t plane : third) out.third.add(_pext_u64(plane, rare), m);
    return planes[0] & planes[1] & planes[2] & rare;
}

KVTIER_VBMI void pack_planes512(PlaneWriter& to, const uint8_t* codes, size_t rows) {
    __m512i table[4];
    for (int k = 0; k < 4; k++) table[k] = line(to.numbers + 64 * k);
    PlaneWriter out = to;
    for (size_t row = 0; row < rows; row++, codes += kRow) {
        const __m512i code = line(codes);
        const __m512i numbers = _mm512_mask_blend_epi8(
            _mm512_movepi8_mask(code), _mm512_permutex2var_epi8(table[0], code, table[1]),
            _mm512_permutex2var_epi8(table[2], code, table[3]));
        uint64_t planes[4];
        for (int k = 0; k < 4; k++) {
            planes[k] = _mm512_test_epi8_mask(numbers, _mm512_set1_epi8(static_cast<char>(1 << k)));
        }
        const uint64_t escaped = add_row(out, planes);
        if (escaped != 0) {
            const auto count = static_cast<unsigned>(std::popcount(escaped));
            _mm512_mask_storeu_epi8(out.escapes, _bzhi_u64(~0ull, count),
                                    _mm512_maskz_compress_epi8(escaped, code));
            out.escapes += count;
        }
    }
    to = out;
}

// --- AVX2 ----------------------------------------------------------------------------------------

struct Two {
    __m256i low, high;
};

template <bool kStreaming>
HALF void give(uint8_t* at, __m256i bytes) {
    if constexpr (kStreaming) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(at), bytes);
    } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bytes);
    }
}
HALF void put(void* at, __m256i bytes) { _mm256_storeu_si256(static_cast<__m256i*>(at), bytes); }
HALF __m256i all(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }

HALF void put_planes(Two bits, uint8_t* to) {
    for (int j = 0; j < 3; j++) {
        const int shift = 7 - j;
        const int low = _mm256_movemask_epi8(_mm256_slli_epi16(bits.low, shift));
        const int high = _mm256_movemask_epi8(_mm256_slli_epi16(bits.high, shift));
        std::memcpy(to + 8 * j, &low, 4);
        std::memcpy(to + 8 * j + 4, &high, 4);
    }
}

HALF __m256i get_planes256(const uint8_t* from) {
    const __m256i bytes =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    __m256i bits = _mm256_setzero_si256();
    for (int j = 0; j < 3; j++) {
        int plane;
        std::memcpy(&plane, from + 8 * j, 4);
        const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(plane), bytes);
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        bits = _mm256_or_si256(bits, _mm256_and_si256(set, all(1 << j)));
    }
    return bits;
}
HALF Two get_two_planes(const uint8_t* from) {
    return {get_planes256(from), get_planes256(from + 4)};
}

HALF Two two_nibbles(const uint8_t* from) {
    const __m256i both = half(from);
    return {_mm256_and_si256(both, all(15)), _mm256_and_si256(_mm256_srli_epi16(both, 4), all(15))};
}

// Shifts bits within bytes; masks those that come from the adjacent byte.
template <int kShift>
HALF Two moved_down(Two bytes, int mask) {
    return {_mm256_and_si256(_mm256_srli_epi16(bytes.low, kShift), all(mask)),
            _mm256_and_si256(_mm256_srli_epi16(bytes.high, kShift), all(mask))};
}
template <int kShift>
HALF Two moved_up(Two bytes, Two below, int mask) {
    const __m256i low = _mm256_and_si256(_mm256_slli_epi16(bytes.low, kShift), all(mask));
    const __m256i high = _mm256_and_si256(_mm256_slli_epi16(bytes.high, kShift), all(mask));
    return {_mm256_or_si256(low, below.low), _mm256_or_si256(high, below.high)};
}

struct Pairs256 {
    static HALF __m256i turned(const uint8_t* in) {
        const __m256i words = half(in);
        return _mm256_or_si256(_mm256_slli_epi16(words, 1), _mm256_srli_epi16(words, 15));
    }
    static HALF __m256i uppers(__m256i a, __m256i b) {
        const __m256i packed =
            _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        return _mm256_permute4x64_epi64(packed, 0xD8);
    }
    static HALF __m256i lowers(__m256i a, __m256i b) {
        const __m256i mask = _mm256_set1_epi16(255);
        const __m256i packed =
            _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
        return _mm256_permute4x64_epi64(packed, 0xD8);
    }
    static HALF Two split(const uint8_t* in, uint8_t* rest) {
        const __m256i a = turned(in), b = turned(in + 32), c = turned(in + 64), d = turned(in + 96);
        put(rest, lowers(a, b));
        put(rest + 32, lowers(c, d));
        return {uppers(a, b), uppers(c, d)};
    }
    // Swaps the quarters in the middle: what `joined` needs.
    static HALF __m256i swapped(__m256i bytes) { return _mm256_permute4x64_epi64(bytes, 0xD8); }
    static HALF Two joined(__m256i upper, __m256i lower) {
        const __m256i a = _mm256_unpacklo_epi8(lower, upper);
        const __m256i b = _mm256_unpackhi_epi8(lower, upper);
        return {_mm256_or_si256(_mm256_srli_epi16(a, 1), _mm256_slli_epi16(a, 15)),
                _mm256_or_si256(_mm256_srli_epi16(b, 1), _mm256_slli_epi16(b, 15))};
    }
    template <bool kStreaming>
    static HALF void join(__m256i upper, __m256i lower, uint8_t* out) {
        const Two words = joined(swapped(upper), swapped(lower));
        give<kStreaming>(out, words.low);
        give<kStreaming>(out + 32, words.high);
    }
    template <bool kStreaming>
    static HALF void join(Two upper, const uint8_t* rest, uint8_t* out) {
        join<kStreaming>(upper.low, half(rest), out);
        join<kStreaming>(upper.high, half(rest + 32), out + 64);
    }
};

template <Element kIs>
struct Row256;

template <>
struct Row256<Element::kBf16> {
    static HALF Two split(const uint8_t* in, uint8_t* rest) { return Pairs256::split(in, rest); }
    template <bool kStreaming>
    static HALF void join(Two exponents, const uint8_t* rest, uint8_t* out) {
        Pairs256::join<kStreaming>(exponents, rest, out);
    }
};

template <>
struct Row256<Element::kFp16> {
    static HALF Two split(const uint8_t* in, uint8_t* rest) {
        const Two upper = Pairs256::split(in, rest);
        put_planes(upper, rest + 64);
        return moved_down<3>(upper, 0x1F);
    }
    template <bool kStreaming>
    static HALF void join(Two exponents, const uint8_t* rest, uint8_t* out) {
        Pairs256::join<kStreaming>(moved_up<3>(exponents, get_two_planes(rest + 64), 0xF8), rest,
                                   out);
    }
};

template <>
struct Row256<Element::kFp32> {
    // Byte k of each of four elements, in each half of a register; its own inverse.
    static HALF __m256i fours(__m256i bytes) {
        return _mm256_shuffle_epi8(
            bytes, _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8,
                                    12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    }
    static HALF __m256i split32(const uint8_t* in, uint8_t* rest) {
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        __m256i r[4];
        for (int i = 0; i < 4; i++) {
            const __m256i words = half(in + 32 * i);
            const __m256i turned =
                _mm256_or_si256(_mm256_slli_epi32(words, 1), _mm256_srli_epi32(words, 31));
            r[i] = _mm256_permutevar8x32_epi32(fours(turned), order);
        }
        const __m256i even01 = _mm256_unpacklo_epi64(r[0], r[1]);
        const __m256i even23 = _mm256_unpacklo_epi64(r[2], r[3]);
        const __m256i odd01 = _mm256_unpackhi_epi64(r[0], r[1]);
        const __m256i odd23 = _mm256_unpackhi_epi64(r[2], r[3]);
        put(rest, _mm256_permute2x128_si256(even01, even23, 0x20));
        put(rest + 64, _mm256_permute2x128_si256(odd01, odd23, 0x20));
        put(rest + 128, _mm256_permute2x128_si256(even01, even23, 0x31));
        return _mm256_permute2x128_si256(odd01, odd23, 0x31);
    }
    template <bool kStreaming>
    static HALF void join32(__m256i exponents, const uint8_t* rest, uint8_t* out) {
        const __m256i p0 = half(rest), p1 = half(rest + 64), p2 = half(rest + 128);
        const __m256i even01 = _mm256_permute2x128_si256(p0, p2, 0x20);
        const __m256i even23 = _mm256_permute2x128_si256(p0, p2, 0x31);
        const __m256i odd01 = _mm256_permute2x128_si256(p1, exponents, 0x20);
        const __m256i odd23 = _mm256_permute2x128_si256(p1, exponents, 0x31);
        const __m256i r[4] = {
            _mm256_unpacklo_epi64(even01, odd01), _mm256_unpackhi_epi64(even01, odd01),
            _mm256_unpacklo_epi64(even23, odd23), _mm256_unpackhi_epi64(even23, odd23)};
        const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        for (int i = 0; i < 4; i++) {
            const __m256i turned = fours(_mm256_permutevar8x32_epi32(r[i], order));
            give<kStreaming>(out + 32 * i, _mm256_or_si256(_mm256_srli_epi32(turned, 1),
                                                           _mm256_slli_epi32(turned, 31)));
        }
    }
    static HALF Two split(const uint8_t* in, uint8_t* rest) {
        return {split32(in, rest), split32(in + 128, rest + 32)};
    }
    template <bool kStreaming>
    static HALF void join(Two exponents, const uint8_t* rest, uint8_t* out) {
        join32<kStreaming>(exponents.low, rest, out);
        join32<kStreaming>(exponents.high, rest + 32, out + 128);
    }
};

struct Bytes256 {
    static HALF __m256i turned(const uint8_t* in) {
        const __m256i bytes = half(in);
        return _mm256_or_si256(_mm256_add_epi8(bytes, bytes),
                               _mm256_and_si256(_mm256_srli_epi16(bytes, 7), all(1)));
    }
    static HALF Two get(const uint8_t* in) { return {turned(in), turned(in + 32)}; }
    template <bool kStreaming>
    static HALF void put_one(__m256i turned, uint8_t* out) {
        give<kStreaming>(
            out, _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(turned, 1), all(0x7F)),
                                 _mm256_and_si256(_mm256_slli_epi16(turned, 7), all(0x80))));
    }
    template <bool kStreaming>
    static HALF void put_two(Two turned, uint8_t* out) {
        put_one<kStreaming>(turned.low, out);
        put_one<kStreaming>(turned.high, out + 32);
    }
};

template <>
struct Row256<Element::kE4m3> {
    static HALF Two split(const uint8_t* in, uint8_t* rest) {
        const Two turned = Bytes256::get(in);
        const __m256i low = _mm256_and_si256(turned.low, all(15));
        const __m256i high = _mm256_and_si256(turned.high, all(15));
        put(rest, _mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
        return moved_down<4>(turned, 15);
    }
    template <bool kStreaming>
    static HALF void join(Two exponents, const uint8_t* rest, uint8_t* out) {
        Bytes256::put_two<kStreaming>(moved_up<4>(exponents, two_nibbles(rest), 0xF0), out);
    }
};

template <>
struct Row256<Element::kE5m2> {
    static HALF Two split(const uint8_t* in, uint8_t* rest) {
        const Two turned = Bytes256::get(in);
        put_planes(turned, rest);
        return moved_down<3>(turned, 0x1F);
    }
    template <bool kStreaming>
    static HALF void join(Two exponents, const uint8_t* rest, uint8_t* out) {
        Bytes256::put_two<kStreaming>(moved_up<3>(exponents, get_two_planes(rest), 0xF8), out);
    }
};

HALF uint64_t equal(Two bytes, __m256i to) {
    const auto low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes.low, to)));
    const auto high =
        static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes.high, to)));
    return low | static_cast<uint64_t>(high) << 32;
}

template <Element kIs, bool kNibbles>
KVTIER_AVX2 size_t split256(const uint8_t* in, const uint8_t* ahead, size_t rows, uint8_t top,
                            uint8_t last, uint8_t* codes, uint8_t* rest, uint8_t* escapes,
                            size_t room, bool) {
    const __m256i tops = all(top), lasts = all(last);
    size_t used = 0;
    for (size_t row = 0; row < rows; row++) {
        if constexpr (kNibbles) fetch_row<kIs>(ahead);
        const Two exponents = Row256<kIs>::split(in, rest);
        const Two found = {_mm256_min_epu8(_mm256_sub_epi8(tops, exponents.low), lasts),
                           _mm256_min_epu8(_mm256_sub_epi8(tops, exponents.high), lasts)};
        if constexpr (kNibbles) {
            put(codes, _mm256_or_si256(found.low, _mm256_slli_epi16(found.high, 4)));
        } else {
            put(codes, found.low);
            put(codes + 32, found.high);
        }
        uint64_t escaped = equal(found, lasts);
        if (escaped != 0) {
            if (static_cast<size_t>(std::popcount(escaped)) > room - used) return kNoRoom;
            uint8_t plain[kRow];
            put(plain, exponents.low);
            put(plain + 32, exponents.high);
            for (; escaped != 0; escaped &= escaped - 1) {
                escapes[used++] = plain[std::countr_zero(escaped)];
            }
        }
        in += kRow * kBytes<kIs>, ahead += kRow * kBytes<kIs>;
        rest += kRestRow<kIs>, codes += kNibbles ? kRowCodes : kRow;
    }
    return used;
}

template <Element kIs, bool kNibbles, bool kStreaming>
KVTIER_AVX2 size_t join256(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes,
                           size_t room, uint8_t top, uint8_t last, size_t rows, uint8_t* out) {
    const __m256i tops = all(top), lasts = all(last);
    size_t used = 0;
    for (size_t row = 0; row < rows; row++) {
        const Two found = kNibbles ? two_nibbles(codes) : Two{half(codes), half(codes + 32)};
        Two exponents = {_mm256_sub_epi8(tops, found.low), _mm256_sub_epi8(tops, found.high)};
        uint64_t escaped = equal(found, lasts);
        if (escaped != 0) {
            if (static_cast<size_t>(std::popcount(escaped)) > room - used) return kNoRoom;
            uint8_t plain[kRow];
            put(plain, exponents.low);
            put(plain + 32, exponents.high);
            for (; escaped != 0; escaped &= escaped - 1) {
                plain[std::countr_zero(escaped)] = escapes[used++];
            }
            exponents = {half(plain), half(plain + 32)};
        }
        Row256<kIs>::template join<kStreaming>(exponents, rest, out);
        out += kRow * kBytes<kIs>, rest += kRestRow<kIs>, codes += kNibbles ? kRowCodes : kRow;
    }
    return used;
}

// For each subset of 8 lanes: a permutation that moves the subset to the end, in order.
using Moves = std::array<std::array<uint8_t, 8>, 256>;
constexpr Moves kToTheEnd = [] {
    Moves moves{};
    for (unsigned chosen = 0; chosen < 256; chosen++) {
        auto to = static_cast<size_t>(8 - std::popcount(chosen));
        for (uint8_t lane = 0; lane < 8; lane++) {
            if (chosen >> lane & 1) moves[chosen][to++] = lane;
        }
    }
    return moves;
}();
// For each subset of 16-bit lanes: the byte shuffle that gives them the next words, others zero.
struct alignas(16) Spread : std::array<uint8_t, 16> {};
constexpr std::array<Spread, 256> kFromTheStart = [] {
    std::array<Spread, 256> spreads{};
    for (unsigned chosen = 0; chosen < 256; chosen++) {
        uint8_t from = 0;
        for (size_t lane = 0; lane < 8; lane++) {
            const bool fed = (chosen >> lane & 1) != 0;
            for (size_t byte = 0; byte < 2; byte++) {
                spreads[chosen][2 * lane + byte] = fed ? from++ : 128;
            }
        }
    }
    return spreads;
}();

HALF __m256i to_the_end(unsigned chosen) {
    return _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kToTheEnd[chosen].data())));
}

HALF __m256i encode_eight(__m256i state, const uint8_t* codes, const EncodeTable& table,
                          uint16_t*& words) {
    const __m256i code =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m256i packed =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(table.packed), code, 4);
    const __m256i reciprocal =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(table.reciprocal), code, 4);
    const __m256i frequency = _mm256_and_si256(packed, _mm256_set1_epi32(511));
    const __m256i lean = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(state, 23));
    const auto full = static_cast<unsigned>(~_mm256_movemask_ps(_mm256_castsi256_ps(lean))) & 255u;
    const __m256i leaving = _mm256_permutevar8x32_epi32(
        _mm256_and_si256(state, _mm256_set1_epi32(0xFFFF)), to_the_end(full));
    // The next words overwrite the bytes before them.
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(words - 8),
        _mm_packus_epi32(_mm256_castsi256_si128(leaving), _mm256_extracti128_si256(leaving, 1)));
    words -= std::popcount(full);
    state = _mm256_blendv_epi8(_mm256_srli_epi32(state, 16), state, lean);
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(state, reciprocal), 32);
    const __m256i odd =
        _mm256_mul_epu32(_mm256_srli_epi64(state, 32), _mm256_srli_epi64(reciprocal, 32));
    const __m256i high = _mm256_blend_epi32(even, odd, 0xAA);
    const __m256i whole = _mm256_srlv_epi32(high, _mm256_srli_epi32(packed, 20));
    const __m256i bias = _mm256_and_si256(_mm256_srli_epi32(packed, 9), _mm256_set1_epi32(2047));
    const __m256i rest = _mm256_sub_epi32(_mm256_set1_epi32(kScale), frequency);
    return _mm256_add_epi32(_mm256_add_epi32(state, bias), _mm256_mullo_epi32(whole, rest));
}

KVTIER_AVX2 void encode256(Encoder* const* streams, size_t count, size_t rows) {
    for (size_t s = 0; s < count; s++) {
        Encoder& stream = *streams[s];
        __m256i state[4];
        for (size_t part = 0; part < 4; part++) state[part] = half(stream.state + 8 * part);
        const uint8_t* codes = stream.codes;
        uint16_t* words = stream.words;
        for (size_t row = 0; row < rows; row++) {
            codes -= kLanes;
            _Pragma("GCC unroll 4") for (size_t part = 4; part-- > 0;) {
                state[part] = encode_eight(state[part], codes + 8 * part, *stream.table, words);
            }
        }
        for (size_t part = 0; part < 4; part++) put(stream.state + 8 * part, state[part]);
        stream.codes = codes, stream.words = words;
    }
}

KVTIER_AVX2 void table256(const uint8_t* frequencies, DecodeTable& table) {
    size_t symbols = 0;
    uint8_t start = 0;
    std::memcpy(table.frequency, frequencies, kSymbolsMost);
    for (size_t i = 0; i < kSymbolsMost && frequencies[i] != 0; i++) {
        table.start[i] = start;
        start = static_cast<uint8_t>(start + frequencies[i]);
        put(table.below[symbols++], all((start - 1) ^ 128));
    }
    // The last symbol ends beyond every slot; the padding to a multiple of four does as well.
    for (symbols--; symbols % 4 != 0; symbols++) put(table.below[symbols], all(127));
    table.fours = symbols / 4;
}

// Bytes 4 * part to 4 * part + 3 of each half, as 32-bit words.
HALF __m256i widened(__m256i bytes, int part) {
    const __m256i first = _mm256_setr_epi32(-256, -255, -254, -253, -256, -255, -254, -253);
    return _mm256_shuffle_epi8(bytes, _mm256_add_epi32(first, _mm256_set1_epi32(4 * part)));
}

HALF __m256i looked_up(const uint8_t* table, __m256i code, __m256i upper) {
    const __m256i low = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), code);
    const __m256i high = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table + 16))),
        code);
    return _mm256_blendv_epi8(low, high, upper);
}

HALF __m256i with_words8(__m256i state, const uint8_t*& words) {
    const __m256i starved = _mm256_cmpgt_epi32(_mm256_set1_epi32(kStateLeast), state);
    const auto chosen = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(starved)));
    const __m128i next = _mm_shuffle_epi8(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(words)),
        _mm_load_si128(reinterpret_cast<const __m128i*>(kFromTheStart[chosen].data())));
    words += 2 * std::popcount(chosen);
    const __m256i fed = _mm256_or_si256(_mm256_slli_epi32(state, 16), _mm256_cvtepu16_epi32(next));
    return _mm256_blendv_epi8(state, fed, starved);
}

// Decodes a row. Looking up slots in memory with gathers takes three times as long.
HALF void decode_row256(__m256i (&state)[4], const DecodeTable& table, uint8_t* codes,
                        const uint8_t*& words) {
    const __m256i mask = _mm256_set1_epi32(kScale - 1);
    const __m256i slots = _mm256_packus_epi16(
        _mm256_packus_epi32(_mm256_and_si256(state[0], mask), _mm256_and_si256(state[1], mask)),
        _mm256_packus_epi32(_mm256_and_si256(state[2], mask), _mm256_and_si256(state[3], mask)));
    const __m256i turned = _mm256_xor_si256(slots, all(128));
    __m256i less[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t four = 0; four < table.fours; four++) {
        for (size_t k = 0; k < 4; k++) {
            const __m256i found = _mm256_cmpgt_epi8(turned, half(table.below[4 * four + k]));
            less[k % 2] = _mm256_sub_epi8(less[k % 2], found);
        }
    }
    const __m256i code = _mm256_add_epi8(less[0], less[1]);
    put(codes, _mm256_permutevar8x32_epi32(code, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    const __m256i upper = _mm256_slli_epi16(code, 3);
    const __m256i frequency = looked_up(table.frequency, code, upper);
    const __m256i from_start = _mm256_sub_epi8(slots, looked_up(table.start, code, upper));
    _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++) {
        const __m256i grown = _mm256_mullo_epi32(widened(frequency, part),
                                                 _mm256_srli_epi32(state[part], kScaleBits));
        state[part] = with_words8(_mm256_add_epi32(grown, widened(from_start, part)), words);
    }
}

template <size_t kCount>
KVTIER_AVX2 void decode256(Decoder* const* streams, size_t rows) {
    __m256i state[kCount][4];
    uint8_t* codes[kCount];
    const uint8_t *words[kCount], *next[kCount];
    const DecodeTable* tables[kCount];
    const size_t step = streams[0]->next_step;
    for (size_t s = 0; s < kCount; s++) {
        for (size_t part = 0; part < 4; part++) state[s][part] = half(streams[s]->state + 8 * part);
        codes[s] = streams[s]->codes, words[s] = streams[s]->words, tables[s] = streams[s]->table;
        next[s] = streams[s]->next;
    }
    for (size_t row = 0; row < rows; row++) {
        _Pragma("GCC unroll 4") for (size_t s = 0; s < kCount; s++) {
            fetch(next[s], step);
            prefetch_words(words[s]);
            decode_row256(state[s], *tables[s], codes[s], words[s]);
            codes[s] += kLanes;
        }
    }
    for (size_t s = 0; s < kCount; s++) {
        for (size_t part = 0; part < 4; part++) put(streams[s]->state + 8 * part, state[s][part]);
        streams[s]->codes = codes[s], streams[s]->words = words[s];
    }
}

// The codes of rows, as those of 512 bits, but in each half with the quarters in the middle
// swapped.
struct Codes256 {
    __m256i table, bit, which[2];

    explicit HALF Codes256(__m128i codes)
        : table(_mm256_broadcastsi128_si256(codes)),
          bit(_mm256_set1_epi64x(static_cast<long long>(0x8040201008040201))) {
        which[0] =
            _mm256_setr_epi64x(0, 0x0202020202020202, 0x0101010101010101, 0x0303030303030303);
        which[1] = _mm256_or_si256(which[0], all(4));
    }

    HALF __m256i half_of(const __m256i (&planes)[4], size_t h) const {
        __m256i numbers = _mm256_setzero_si256();
        for (int k = 3; k >= 0; k--) {
            const __m256i spread = _mm256_shuffle_epi8(planes[k], which[h]);
            const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
            numbers = _mm256_sub_epi8(_mm256_add_epi8(numbers, numbers), set);
        }
        return _mm256_shuffle_epi8(table, numbers);
    }
    HALF Two next(PlaneReader& in, uint64_t& escaped) const {
        uint64_t bits[4];
        number_planes(in, bits);
        escaped = bits[0] & bits[1] & bits[2] & bits[3];
        __asm__("" : "+m"(bits));  // loads that broadcast are cheaper than moves between registers
        __m256i planes[4];
        for (int k = 0; k < 4; k++) planes[k] = _mm256_set1_epi64x(static_cast<long long>(bits[k]));
        return {half_of(planes, 0), half_of(planes, 1)};
    }
};

// The same with these escapes at their elements.
KVTIER_AVX2 __attribute__((noinline)) Two with_escapes(const uint8_t* escapes, uint64_t escaped,
                                                       uint8_t turn, Two codes) {
    const __m256i low = Pairs256::swapped(half(kInOrder.data()));
    const __m256i high = _mm256_or_si256(low, all(32));
    for (; escaped != 0; escaped &= escaped - 1) {
        const __m256i here = all(std::countr_zero(escaped)), what = all(*escapes++ ^ turn);
        codes.low = _mm256_blendv_epi8(codes.low, what, _mm256_cmpeq_epi8(here, low));
        codes.high = _mm256_blendv_epi8(codes.high, what, _mm256_cmpeq_epi8(here, high));
    }
    return codes;
}
// Returns false if there are too few escapes.
HALF bool put_escapes(PlaneReader& in, uint64_t escaped, uint8_t turn, Two& codes) {
    const auto count = static_cast<size_t>(std::popcount(escaped));
    if (count > in.escaped) return false;
    codes = with_escapes(in.escapes, escaped, turn, codes);
    in.escapes += count, in.escaped -= count;
    return true;
}

KVTIER_AVX2 bool unpack_planes256(PlaneReader& from, uint8_t* codes, size_t rows) {
    const Codes256 by(_mm_load_si128(reinterpret_cast<const __m128i*>(from.codes)));
    PlaneReader in = from;
    for (size_t row = 0; row < rows; row++, codes += kRow) {
        fetch(in.next, 64);
        fetch(in.next, in.next_step - 64);
        uint64_t escaped;
        Two found = by.next(in, escaped);
        if (escaped != 0 && !put_escapes(in, escaped, 0, found)) return false;
        put(codes, Pairs256::swapped(found.low));
        put(codes + 32, Pairs256::swapped(found.high));
    }
    from = in;
    return from.is_sound();
}

struct Rows256 {
    Codes256 by;
    __m256i latest[2];
    PlaneReader in;
    const uint8_t* rest;
    uint8_t* to;
    Stripes256 digest;

    HALF Rows256(const PlaneReader& from, const uint8_t* rests, const LentDigest& lent)
        : by(_mm_xor_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(from.codes)),
                           _mm_set1_epi8(-1))),  // an exponent is 255 minus its code
          in(from),
          rest(rests),
          to(lent.to) {
        digest.load(*lent.acc);
    }

    // Row `k` after the present one.
    template <bool kStreaming>
    HALF bool row(size_t k, const uint8_t* secret) {
        uint64_t escaped;
        Two exponents = by.next(in, escaped);
        if (__builtin_expect(escaped != 0, 0) && !put_escapes(in, escaped, 0xFF, exponents)) {
            return false;
        }
        const uint8_t* const lower = rest + k * kRow;
        const Two one = Pairs256::joined(exponents.low, Pairs256::swapped(half(lower)));
        const Two other = Pairs256::joined(exponents.high, Pairs256::swapped(half(lower + 32)));
        uint8_t* const lines = to + 2 * k * kStripe;
        give<kStreaming>(lines, one.low);
        give<kStreaming>(lines + 32, one.high);
        give<kStreaming>(lines + kStripe, other.low);
        give<kStreaming>(lines + kStripe + 32, other.high);
        digest.add(0, one.low, secret);
        digest.add(1, one.high, secret);
        digest.add(0, other.low, secret + 8);
        digest.add(1, other.high, secret + 8);
        latest[0] = other.low, latest[1] = other.high;
        return true;
    }
    HALF void put_latest(uint8_t* at) const { put(at, latest[0]), put(at + 32, latest[1]); }
    HALF void skip(size_t rows) { rest += rows * kRow, to += 2 * rows * kStripe; }
};

KVTIER_DIGEST_PLANES(digest_planes256, Rows256, KVTIER_AVX2)
#undef KVTIER_DIGEST_PLANES

KVTIER_AVX2 void pack_planes256(PlaneWriter& to, const uint8_t* codes, size_t rows) {
    // Of each 16 codes with numbers: the first one, and what turns the number of an escape into
    // theirs.
    __m256i firsts[16], turns[16];
    size_t used = 0;
    for (int first = 0; first < 256; first += 16) {
        const __m128i turn =
            _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(to.numbers + first)),
                          _mm_set1_epi8(kPlaneEscape));
        if (_mm_testz_si128(turn, turn)) continue;
        firsts[used] = all(first);
        turns[used++] = _mm256_broadcastsi128_si256(turn);
    }
    PlaneWriter out = to;
    for (size_t row = 0; row < rows; row++, codes += kRow) {
        const Two code = {half(codes), half(codes + 32)};
        Two numbers = {all(kPlaneEscape), all(kPlaneEscape)};
        for (size_t k = 0; k < used; k++) {
            // Other codes have the upper bit then, for which a shuffle gives 0.
            const __m256i low = _mm256_adds_epu8(_mm256_sub_epi8(code.low, firsts[k]), all(0x70));
            const __m256i high = _mm256_adds_epu8(_mm256_sub_epi8(code.high, firsts[k]), all(0x70));
            numbers.low = _mm256_xor_si256(numbers.low, _mm256_shuffle_epi8(turns[k], low));
            numbers.high = _mm256_xor_si256(numbers.high, _mm256_shuffle_epi8(turns[k], high));
        }
        uint64_t planes[4];
        for (int k = 0; k < 4; k++) {
            const auto low =
                static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(numbers.low, 7 - k)));
            const auto high =
                static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(numbers.high, 7 - k)));
            planes[k] = low | uint64_t{high} << 32;
        }
        for (uint64_t left = add_row(out, planes); left != 0; left &= left - 1) {
            *out.escapes++ = codes[std::countr_zero(left)];
        }
    }
    to = out;
}

// --- the tables ----------------------------------------------------------------------------------

template <Element kIs, bool kNibbles>
size_t joined512(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes, size_t room,
                 uint8_t top, uint8_t last, size_t rows, uint8_t* out, bool streaming) {
    const bool streamed = streaming && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    return (streamed
                ? join512<kIs, kNibbles, true>
                : join512<kIs, kNibbles, false>)(codes, rest, escapes, room, top, last, rows, out);
}
template <Element kIs, bool kNibbles>
size_t joined256(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes, size_t room,
                 uint8_t top, uint8_t last, size_t rows, uint8_t* out, bool streaming) {
    const bool streamed = streaming && reinterpret_cast<uintptr_t>(out) % 32 == 0;
    return (streamed
                ? join256<kIs, kNibbles, true>
                : join256<kIs, kNibbles, false>)(codes, rest, escapes, room, top, last, rows, out);
}
template <Element kIs>
constexpr RowKernels kRows512 = {split512<kIs, false>,
                                 kIs == Element::kBf16 ? pack512 : split512<kIs, true>,
                                 joined512<kIs, false>, joined512<kIs, true>};
template <Element kIs>
constexpr RowKernels kRows256 = {split256<kIs, false>, split256<kIs, true>, joined256<kIs, false>,
                                 joined256<kIs, true>};

}  // namespace

const Kernels kKernelsVbmi = {
    {kRows512<Element::kBf16>, kRows512<Element::kFp16>, kRows512<Element::kFp32>,
     kRows512<Element::kE4m3>, kRows512<Element::kE5m2>},
    [](Encoder* const* streams, size_t count, size_t rows) {
        if (count == 2) return encode512<2>(streams, rows);
        encode512<1>(streams, rows);
    },
    [](Decoder* const* streams, size_t count, size_t rows) {
        if (count == 4) return decode512<4>(streams, rows);
        if (count == 2) return decode512<2>(streams, rows);
        decode512<1>(streams, rows);
    },
    table512,
    count512,
    pack_planes512,
    unpack_planes512,
    [](PlaneReader& from, const uint8_t* rest, const LentDigest& lent) {
        return (lent.streaming ? digest_planes512<true> : digest_planes512<false>)(from, rest,
                                                                                   lent);
    }};

const Kernels kKernelsAvx2 = {
    {kRows256<Element::kBf16>, kRows256<Element::kFp16>, kRows256<Element::kFp32>,
     kRows256<Element::kE4m3>, kRows256<Element::kE5m2>},
    encode256,
    [](Decoder* const* streams, size_t count, size_t rows) {
        if (count == 4) return decode256<4>(streams, rows);
        if (count == 2) return decode256<2>(streams, rows);
        decode256<1>(streams, rows);
    },
    table256,
    count_plain,
    pack_planes256,
    unpack_planes256,
    [](PlaneReader& from, const uint8_t* rest, const LentDigest& lent) {
        return (lent.streaming ? digest_planes256<true> : digest_planes256<false>)(from, rest,
                                                                                   lent);
    }};

}  // namespace kvtier::codec
#endif
