// Lossless codecs: the layout of parts, the portable kernels, and the choice of an implementation.
#include "codec/codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "codec/parts.h"

namespace kvtier::codec {

void count_plain(const uint8_t* codes, size_t rows, uint32_t* counts) {
    // Four tables, so that equal codes in sequence do not wait for each other.
    uint16_t apart[4][256] = {};
    for (size_t k = 0; k < rows * kRow; k += 4) {
        for (size_t j = 0; j < 4; j++) apart[j][codes[k + j]]++;
    }
    for (size_t i = 0; i < 256; i++) {
        counts[255 - i] += apart[0][i] + apart[1][i] + apart[2][i] + apart[3][i];
    }
}

namespace {

uint64_t deposited(uint64_t bits, uint64_t mask) {
    uint64_t found = 0;
    for (; mask != 0; mask &= mask - 1, bits >>= 1) {
        if (bits & 1) found |= mask & (0 - mask);
    }
    return found;
}

KVTIER_NUMBER_PLANES(, deposited)

}  // namespace

void pack_planes_plain(PlaneWriter& to, const uint8_t* codes, size_t rows) {
    for (size_t row = 0; row < rows; row++, codes += kRow, to.first += kFirstPlanes) {
        uint64_t first[2] = {}, second[2] = {}, third[3] = {};
        unsigned others = 0, rare = 0;
        for (size_t i = 0; i < kRow; i++) {
            const uint64_t number = to.numbers[codes[i]], least = number < 4 ? number : 3;
            first[0] |= (least & 1) << i, first[1] |= least >> 1 << i;
            if (number < 4) continue;
            const uint64_t next = number < 8 ? 7 - number : 3;
            second[0] |= (next & 1) << others, second[1] |= next >> 1 << others;
            others++;
            if (number < 8) continue;
            for (size_t k = 0; k < 3; k++) third[k] |= ((number ^ 4) >> k & 1) << rare;
            rare++;
            if (number == kPlaneEscape) *to.escapes++ = codes[i];
        }
        std::memcpy(to.first, first, sizeof first);
        for (const uint64_t plane : second) to.second.add(plane, others);
        for (const uint64_t plane : third) to.third.add(plane, rare);
    }
}

bool unpack_planes_plain(PlaneReader& from, uint8_t* codes, size_t rows) {
    for (size_t row = 0; row < rows; row++) {
        uint64_t planes[4];
        number_planes(from, planes);
        for (size_t i = 0; i < kRow; i++) {
            size_t number = 0;
            for (size_t k = 0; k < 4; k++) number |= (planes[k] >> i & 1) << k;
            *codes = from.codes[number];
            if (number == kPlaneEscape) {
                if (from.escaped == 0) return false;
                *codes = *from.escapes++;
                from.escaped--;
            }
            codes++;
        }
    }
    return from.is_sound();
}

namespace {

// --- plain kernels -------------------------------------------------------------------------------

template <Element kIs, bool kNibbles>
size_t split_plain(const uint8_t* in, const uint8_t*, size_t rows, uint8_t top, uint8_t last,
                   uint8_t* codes, uint8_t* rest, uint8_t* escapes, size_t room, bool) {
    size_t used = 0;
    for (size_t row = 0; row < rows; row++, rest += kRestRow<kIs>) {
        std::memset(rest, 0, kRestRow<kIs>);
        uint8_t found[kRow];
        for (size_t i = 0; i < kRow; i++, in += kBytes<kIs>) {
            typename Form<kIs>::Bits bits;
            std::memcpy(&bits, in, sizeof bits);
            const uint32_t exponent = exponent_of<kIs>(bits);
            found[i] = static_cast<uint8_t>(code_of(exponent, top, last));
            put_rest<kIs>(rest, i, rest_of<kIs>(bits));
            if (found[i] != last) continue;
            if (used == room) return kNoRoom;
            escapes[used++] = static_cast<uint8_t>(exponent);
        }
        if constexpr (kNibbles) {
            for (size_t i = 0; i < kRowCodes; i++) {
                *codes++ = static_cast<uint8_t>(found[i] | found[kRowCodes + i] << 4);
            }
        } else {
            std::memcpy(codes, found, kRow);
            codes += kRow;
        }
    }
    return used;
}

template <Element kIs, bool kNibbles>
size_t join_plain(const uint8_t* codes, const uint8_t* rest, const uint8_t* escapes, size_t room,
                  uint8_t top, uint8_t last, size_t rows, uint8_t* out, bool) {
    size_t used = 0;
    for (size_t row = 0; row < rows; row++, rest += kRestRow<kIs>) {
        for (size_t i = 0; i < kRow; i++, out += kBytes<kIs>) {
            const uint8_t code =
                kNibbles ? codes[i % kRowCodes] >> (i / kRowCodes * 4) & 15 : codes[i];
            uint8_t exponent = static_cast<uint8_t>(top - code);
            if (code == last) {
                if (used == room) return kNoRoom;
                exponent = escapes[used++];
            }
            const auto bits = element_of<kIs>(exponent, get_rest<kIs>(rest, i));
            std::memcpy(out, &bits, sizeof bits);
        }
        codes += kNibbles ? kRowCodes : kRow;
    }
    return used;
}

void encode_plain(Encoder* const* streams, size_t count, size_t rows) {
    for (size_t s = 0; s < count; s++) {
        Encoder& stream = *streams[s];
        for (size_t row = 0; row < rows; row++) {
            stream.codes -= kLanes;
            for (size_t lane = kLanes; lane-- > 0;) {
                const uint8_t code = stream.codes[lane];
                const uint32_t packed = stream.table->packed[code];
                const Symbol symbol = {stream.table->reciprocal[code], packed & 511,
                                       packed >> 9 & 2047, packed >> 20};
                uint32_t& state = stream.state[lane];
                if (needs_word(state, symbol.frequency)) {
                    *--stream.words = static_cast<uint16_t>(state);
                    state >>= 16;
                }
                state = state_after_encode(state, symbol);
            }
        }
    }
}

void decode_plain(Decoder* const* streams, size_t count, size_t rows) {
    for (size_t s = 0; s < count; s++) {
        Decoder& stream = *streams[s];
        for (size_t row = 0; row < rows; row++) {
            for (size_t lane = 0; lane < kLanes; lane++) {
                uint32_t& state = stream.state[lane];
                const uint32_t slot = stream.table->slot[state & (kScale - 1)];
                *stream.codes++ = static_cast<uint8_t>(slot);
                state = state_after_decode(state, slot >> 8 & 255, slot >> 16);
                if (state >= kStateLeast) continue;
                state = state << 16 | stream.words[0] | static_cast<uint32_t>(stream.words[1]) << 8;
                stream.words += 2;
            }
        }
    }
}

void table_plain(const uint8_t* frequencies, DecodeTable& table) {
    uint32_t start = 0;
    for (uint32_t i = 0; i < kSymbolsMost; i++) {
        for (uint32_t k = 0; k < frequencies[i]; k++) {
            table.slot[start + k] = i | static_cast<uint32_t>(frequencies[i]) << 8 | k << 16;
        }
        start += frequencies[i];
    }
}

constexpr std::make_index_sequence<kElements> kAllElements;

template <size_t... kIndex>
constexpr std::array<RowKernels, kElements> plain_rows(std::index_sequence<kIndex...>) {
    return {{{split_plain<Element{kIndex}, false>, split_plain<Element{kIndex}, true>,
              join_plain<Element{kIndex}, false>, join_plain<Element{kIndex}, true>}...}};
}

constexpr Kernels plain() {
    Kernels kernels{};
    const auto rows = plain_rows(kAllElements);
    for (size_t i = 0; i < kElements; i++) kernels.rows[i] = rows[i];
    kernels.encode = encode_plain;
    kernels.decode = decode_plain;
    kernels.table = table_plain;
    kernels.count = count_plain;
    kernels.pack_planes = pack_planes_plain;
    kernels.unpack_planes = unpack_planes_plain;
    return kernels;
}
constexpr Kernels kPlain = plain();

// --- independent of the processor ----------------------------------------------------------------

struct Sizes {
    size_t bytes, rest_row;
};

constexpr std::array<Sizes, kElements> kSizes = [] {
    std::array<Sizes, kElements> sizes{};
    const auto put = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        ((sizes[kIndex] = {kBytes<Element{kIndex}>, kRestRow<Element{kIndex}>}), ...);
    };
    put(kAllElements);
    return sizes;
}();
constexpr size_t kRowMost = kRow * 4, kRestRowMost = kRow * 3;

// The elements of a part in rows: whole rows, then one that is filled up, then the remaining bytes.
struct Shape {
    Shape(Element is, size_t raw_bytes)
        : sizes(kSizes[static_cast<size_t>(is)]),
          elements(raw_bytes / sizes.bytes),
          whole(elements / kRow),
          rows(rows_of(elements)),
          odd(raw_bytes % sizes.bytes) {}

    size_t row_bytes() const { return kRow * sizes.bytes; }
    size_t tail_bytes() const { return (elements - whole * kRow) * sizes.bytes; }

    Sizes sizes;
    size_t elements, whole, rows, odd;
};

// The last row, filled up with elements of exponent `top`.
template <Element kIs>
void fill_up(const uint8_t* from, size_t nbytes, uint8_t top, uint8_t* row) {
    const auto bits = element_of<kIs>(top, 0);
    for (size_t at = 0; at < kRow * kBytes<kIs>; at += kBytes<kIs>) {
        std::memcpy(row + at, &bits, sizeof bits);
    }
    std::memcpy(row, from, nbytes);
}

template <size_t... kIndex>
void fill_up(Element is, const uint8_t* from, size_t nbytes, uint8_t top, uint8_t* row,
             std::index_sequence<kIndex...>) {
    constexpr decltype(&fill_up<Element::kBf16>) kBy[] = {fill_up<Element{kIndex}>...};
    kBy[static_cast<size_t>(is)](from, nbytes, top, row);
}

// Counts the exponents of some rows; there is at least one.
void count(const RowKernels& by, const uint8_t* in, const Shape& shape, size_t least, size_t one_in,
           uint32_t* counts) {
    const size_t rows = sampled_rows(shape.whole, least, one_in);
    std::fill_n(counts, 256, 0);
    uint8_t codes[kCountedRows * kRow], rest[kRestRowMost], escapes[kRow];
    for (size_t first = 0; first < rows; first += kCountedRows) {
        const size_t some = std::min(kCountedRows, rows - first);
        for (size_t i = 0; i < some; i++) {
            // With 255 as the top and as the last code, a code is 255 minus the exponent.
            const uint8_t* const row =
                in + sampled_row(first + i, rows, shape.whole) * shape.row_bytes();
            by.split(row, row, 1, 255, 255, codes + i * kRow, rest, escapes, kRow, false);
        }
        kernels().count(codes, some, counts);
    }
}

// Splits the rows [first, first + rows) of a part: whole ones and, last, the one filled up.
template <typename Split>
size_t split_rows(Element is, Split split, const Shape& shape, const uint8_t* in,
                  const uint8_t* ahead, size_t first, size_t rows, size_t row_codes, uint8_t top,
                  uint8_t last, uint8_t* codes, uint8_t* rest, uint8_t* escapes, size_t room,
                  bool streaming) {
    const size_t whole = std::min(rows, shape.whole - first);
    const uint8_t* const from = in + first * shape.row_bytes();
    size_t used = split(from, ahead + first * shape.row_bytes(), whole, top, last, codes, rest,
                        escapes, room, streaming);
    if (used == kNoRoom || whole == rows) return used;
    uint8_t row[kRowMost];
    fill_up(is, from + whole * shape.row_bytes(), shape.tail_bytes(), top, row, kAllElements);
    const size_t more =
        split(row, row, 1, top, last, codes + whole * row_codes,
              rest + whole * shape.sizes.rest_row, escapes + used, room - used, false);
    return more == kNoRoom ? more : used + more;
}

// The inverse of split_rows.
template <typename Join>
size_t join_rows(Join join, const Shape& shape, size_t first, size_t rows, size_t row_codes,
                 uint8_t top, uint8_t last, const uint8_t* codes, const uint8_t* rest,
                 const uint8_t* escapes, size_t room, uint8_t* out, bool streaming) {
    const size_t whole = std::min(rows, shape.whole - first);
    uint8_t* const to = out + first * shape.row_bytes();
    const size_t used = join(codes, rest, escapes, room, top, last, whole, to, streaming);
    if (used == kNoRoom || whole == rows) return used;
    uint8_t row[kRowMost];
    const size_t more = join(codes + whole * row_codes, rest + whole * shape.sizes.rest_row,
                             escapes + used, room - used, top, last, 1, row, false);
    if (more == kNoRoom) return more;
    std::memcpy(to + whole * shape.row_bytes(), row, shape.tail_bytes());
    return used + more;
}

// Rows that are decoded at a time: one page of bf16.
inline constexpr size_t kTileRows = 32;

// --- fix4 ----------------------------------------------------------------------------------------

// Returns the encoded size, or kNoRoom if it is not smaller than the part.
size_t encode_fix4(Element is, const uint8_t* in, size_t raw_bytes, const uint8_t* ahead,
                   bool streaming, uint8_t* out) {
    const Shape shape(is, raw_bytes);
    const size_t fixed = kFix4Header + shape.rows * (kRowCodes + shape.sizes.rest_row) + shape.odd;
    if (shape.whole == 0 || fixed >= raw_bytes) return kNoRoom;
    const RowKernels& by = kernels().rows[static_cast<size_t>(is)];
    uint32_t counts[256];
    count(by, in, shape, kFix4SampleLeast, kFix4SampleOneIn, counts);
    const auto top = static_cast<uint8_t>(best_top(counts, kEscape4));
    uint8_t* const codes = out + kFix4Header;
    uint8_t* const rest = codes + shape.rows * kRowCodes;
    uint8_t* const escapes = rest + shape.rows * shape.sizes.rest_row;
    const size_t used =
        split_rows(is, by.pack, shape, in, ahead, 0, shape.rows, kRowCodes, top, kEscape4, codes,
                   rest, escapes, raw_bytes - 1 - fixed, streaming);
    if (used == kNoRoom) return used;
    std::memcpy(escapes + used, in + raw_bytes - shape.odd, shape.odd);
    std::memset(out, 0, kFix4Header);
    out[kElementAt] = static_cast<uint8_t>(is);
    out[kTopAt] = top;
    put32(out + kCountAt, used);
    return fixed + used;
}

bool decode_fix4(Element is, const Decoded& part, bool streaming) {
    const Shape shape(is, part.raw_bytes);
    const size_t fixed = kFix4Header + shape.rows * (kRowCodes + shape.sizes.rest_row) + shape.odd;
    if (part.bytes < fixed || part.from[kElementAt] != static_cast<uint8_t>(is)) return false;
    const size_t escaped = part.bytes - fixed;
    if (get32(part.from + kCountAt) != escaped) return false;
    const uint8_t* const codes = part.from + kFix4Header;
    const uint8_t* const rest = codes + shape.rows * kRowCodes;
    const uint8_t* const escapes = rest + shape.rows * shape.sizes.rest_row;
    const RowKernels& by = kernels().rows[static_cast<size_t>(is)];
    size_t used = 0;
    for (size_t first = 0; first < shape.rows; first += kTileRows) {
        const size_t rows = std::min(kTileRows, shape.rows - first);
        if (streaming)
            prefetch_pages(part.raw + first * shape.row_bytes() + kPagesAhead,
                           rows * shape.row_bytes());
        const size_t more =
            join_rows(by.unpack, shape, first, rows, kRowCodes, part.from[kTopAt], kEscape4,
                      codes + first * kRowCodes, rest + first * shape.sizes.rest_row,
                      escapes + used, escaped - used, part.raw, streaming);
        if (more == kNoRoom) return false;
        used += more;
    }
    if (used != escaped) return false;
    std::memcpy(part.raw + part.raw_bytes - shape.odd, escapes + escaped, shape.odd);
    return true;
}

// --- r32 -----------------------------------------------------------------------------------------

// A stream that is being encoded next to another one, and its state.
struct Lane {
    Encoder stream;
    EncodeTable table;
    Encoded* part;
    const uint8_t* after;  // the stream that this lane encodes next
    size_t first, rows;    // rows of the part
    Frequencies frequencies;
    size_t escaped;
    uint8_t codes[kStreamRows * kRow];
    uint8_t rest[kStreamRows * kRestRowMost];
    uint8_t escapes[kStreamRows * kRow];
    uint16_t words[kWordSlack + kStreamWords];

    const uint16_t* words_end() const { return words + kWordSlack + kStreamWords; }
};

// Writes the parts of a batch one after another, while their streams are encoded.
class R32Writer {
 public:
    R32Writer(Element is, bool streaming, uint8_t* out)
        : is_(is), streaming_(streaming), by_(kernels()), out_(out), lanes_(lanes()) {}

    void add(Encoded& part, const uint8_t* ahead) {
        const Shape shape(is_, part.raw_bytes);
        if (shape.whole == 0 || fixed(shape) >= part.raw_bytes) {
            flush();
            out_ += keep_raw(part, out_);
            return;
        }
        const RowKernels& rows = by_.rows[static_cast<size_t>(is_)];
        uint32_t counts[256];
        count(rows, part.raw, shape, kR32SampleLeast, kR32SampleOneIn, counts);
        const Frequencies frequencies = frequencies_of(counts);
        for (size_t first = 0; first < shape.rows; first += kStreamRows) {
            const size_t after = first + kInTogether * kStreamRows;
            Lane& lane = lanes_[waiting_++];
            lane.part = &part;
            lane.after = after < shape.rows ? part.raw + after * shape.row_bytes() : ahead;
            lane.first = first;
            lane.rows = std::min(kStreamRows, shape.rows - first);
            lane.frequencies = frequencies;
            make_table(frequencies.of, frequencies.symbols, lane.table);
            if (waiting_ == kInTogether) flush();
        }
    }

    uint8_t* finish() {
        flush();
        return out_;
    }

 private:
    static Lane* lanes() {
        // One per thread, and kept: too large for a stack, and too slow to allocate each time.
        thread_local const std::unique_ptr<Lane[]> kept(new Lane[kInTogether]);
        return kept.get();
    }

    static size_t fixed(const Shape& shape) {
        const size_t streams = streams_of(shape.rows);
        return kR32Header + streams * (kStreamEntry + kStatesBytes) +
               shape.rows * shape.sizes.rest_row + shape.odd;
    }

    void flush() {
        Encoder* streams[kInTogether];
        size_t rows[kInTogether] = {};
        for (size_t i = 0; i < waiting_; i++) {
            split(lanes_[i]);
            streams[i] = &lanes_[i].stream;
            rows[i] = lanes_[i].rows * (kRow / kLanes);
        }
        advance(by_.encode, streams, rows, waiting_);
        for (size_t i = 0; i < waiting_; i++) place(lanes_[i]);
        waiting_ = 0;
    }

    // Splits the rows of a stream into codes and rests.
    void split(Lane& lane) {
        const Shape shape(is_, lane.part->raw_bytes);
        const uint8_t* const in = lane.part->raw;
        lane.escaped =
            split_rows(is_, by_.rows[static_cast<size_t>(is_)].split, shape, in, in, lane.first,
                       lane.rows, kRow, static_cast<uint8_t>(lane.frequencies.top),
                       static_cast<uint8_t>(lane.frequencies.symbols - 1), lane.codes, lane.rest,
                       lane.escapes, sizeof lane.escapes, false);
        std::fill_n(lane.stream.state, kLanes, kStateLeast);
        lane.stream.codes = lane.codes + lane.rows * kRow;
        lane.stream.words = lane.words + kWordSlack + kStreamWords;
        lane.stream.table = &lane.table;
        lane.stream.next = lane.after;
        lane.stream.next_step = shape.row_bytes() * kLanes / kRow;
    }

    void place(const Lane& lane) {
        Encoded& part = *lane.part;
        const Shape shape(is_, part.raw_bytes);
        const size_t words = static_cast<size_t>(lane.words_end() - lane.stream.words);
        if (lane.first == 0) begin(lane, shape);
        const size_t number = lane.first / kStreamRows;
        size_ += 2 * words + lane.escaped;
        if (size_ < part.raw_bytes) {
            uint8_t* const entry = out_ + kR32Header + number * kStreamEntry;
            put32(entry, words);
            put32(entry + 4, lane.escaped);
            const size_t rest_row = shape.sizes.rest_row;
            put_bytes(rest_ + lane.first * rest_row, lane.rest, lane.rows * rest_row, streaming_);
            std::memcpy(at_, lane.stream.state, kStatesBytes);
            put_bytes(at_ + kStatesBytes, lane.stream.words, 2 * words, streaming_);
            at_ += kStatesBytes + 2 * words;
            std::memcpy(at_, lane.escapes, lane.escaped);
            at_ += lane.escaped;
        }
        if (lane.first + lane.rows == shape.rows) end(part, shape);
    }

    void begin(const Lane& lane, const Shape& shape) {
        size_ = fixed(shape);
        std::memset(out_, 0, kR32Header);
        out_[kElementAt] = static_cast<uint8_t>(is_);
        out_[kTopAt] = static_cast<uint8_t>(lane.frequencies.top);
        out_[kSymbolsAt] = static_cast<uint8_t>(lane.frequencies.symbols);
        put32(out_ + kCountAt, streams_of(shape.rows));
        std::memcpy(out_ + kFrequenciesAt, lane.frequencies.of, kSymbolsMost);
        rest_ = out_ + kR32Header + streams_of(shape.rows) * kStreamEntry;
        at_ = rest_ + shape.rows * shape.sizes.rest_row;
    }

    void end(Encoded& part, const Shape& shape) {
        if (size_ >= part.raw_bytes) {
            out_ += keep_raw(part, out_);
            return;
        }
        std::memcpy(at_, part.raw + part.raw_bytes - shape.odd, shape.odd);
        part.codec = Codec::kR32;
        part.bytes = size_;
        out_ += size_;
    }

    Element is_;
    bool streaming_;
    const Kernels& by_;
    uint8_t* out_;  // the start of the part whose streams are being placed
    Lane* lanes_;
    size_t waiting_ = 0;
    size_t size_ = 0;  // of that part, as far as it is known
    uint8_t* rest_ = nullptr;
    uint8_t* at_ = nullptr;
};

// A stream that is being decoded, one tile of rows at a time. Words are read in place. The last
// words are copied first, so that a damaged stream reads no memory outside.
inline constexpr size_t kTileWords = 2 * (words_most(kTileRows * kRow) + kWordSlack);  // in bytes

struct Out {
    Decoder stream;
    DecodeTable table;
    const uint8_t* words_end;
    const uint8_t* rest;
    const uint8_t* escapes;
    size_t escaped;
    const Decoded* part;
    uint8_t top, last;
    size_t number;       // of the part, in its list
    size_t first, rows;  // remaining rows
    bool moved;
    uint8_t codes[kTileRows * kRow];
    uint8_t tail[2 * kTileWords];
};

// Decodes parts stream by stream, up to four streams at a time.
class R32Reader {
 public:
    R32Reader(Element is, bool streaming)
        : is_(is), streaming_(streaming), by_(kernels()), lanes_(lanes()) {}

    // Prefetches the start of a later part: its first stream and its pages.
    void prefetch(const Decoded& part) const {
        const Shape shape(is_, part.raw_bytes);
        const uint8_t* const rest = part.from + kR32Header + streams_of(shape.rows) * kStreamEntry;
        const uint8_t* const states = rest + shape.rows * shape.sizes.rest_row;
        for (size_t at = 0; at < 2 * kStatesBytes; at += 64) {
            __builtin_prefetch(part.from + at);
            __builtin_prefetch(states + at);
        }
        if (streaming_) prefetch_pages(part.raw, kPagesAhead);
    }

    // Returns false if this part, or one before it, is damaged; `failed` returns which.
    bool add(const Decoded& part, size_t number) {
        const Shape shape(is_, part.raw_bytes);
        const size_t streams = streams_of(shape.rows);
        const size_t rest_bytes = shape.rows * shape.sizes.rest_row;
        const size_t fixed =
            kR32Header + streams * (kStreamEntry + kStatesBytes) + rest_bytes + shape.odd;
        const uint8_t* const from = part.from;
        if (part.bytes < fixed || from[kElementAt] != static_cast<uint8_t>(is_) ||
            get32(from + kCountAt) != streams || !valid_frequencies(from)) {
            return fail(number);
        }
        size_t left = part.bytes - fixed;  // of words and escapes
        const uint8_t* rest = from + kR32Header + streams * kStreamEntry;
        const uint8_t* at = rest + rest_bytes;
        for (size_t i = 0; i < streams; i++) {
            const uint8_t* const entry = from + kR32Header + i * kStreamEntry;
            const size_t words = get32(entry), escaped = get32(entry + 4);
            if (words > left / 2 || escaped > left - 2 * words) return fail(number);
            left -= 2 * words + escaped;
            Out& lane = lanes_[waiting_++];
            lane.first = i * kStreamRows;
            lane.rows = std::min(kStreamRows, shape.rows - lane.first);
            lane.part = &part;
            lane.number = number;
            lane.top = from[kTopAt];
            lane.last = static_cast<uint8_t>(from[kSymbolsAt] - 1);
            lane.rest = rest + lane.first * shape.sizes.rest_row;
            lane.stream.next_step = shape.sizes.rest_row * kLanes / kRow;
            by_.table(from + kFrequenciesAt, lane.table);
            if (!begin(lane, at, words, escaped)) return fail(number);
            at += kStatesBytes + 2 * words + escaped;
            if (waiting_ == kSideBySide && !flush()) return false;
        }
        if (left != 0) return fail(number);
        std::memcpy(part.raw + part.raw_bytes - shape.odd, at, shape.odd);
        return true;
    }

    bool flush() {
        for (size_t i = 0; i < waiting_;) {
            const size_t count = std::bit_floor(waiting_ - i);
            if (!put(lanes_ + i, count)) return false;
            i += count;
        }
        waiting_ = 0;
        return true;
    }

    size_t failed() const { return failed_; }

 private:
    static Out* lanes() {
        thread_local const std::unique_ptr<Out[]> kept(new Out[kSideBySide]());
        return kept.get();
    }

    bool fail(size_t number) {
        failed_ = number;
        waiting_ = 0;
        return false;
    }

    // True if an encoder could have written these frequencies: each slot has a symbol.
    static bool valid_frequencies(const uint8_t* from) {
        const size_t symbols = from[kSymbolsAt];
        if (symbols < kSymbolsLeast || symbols > kSymbolsMost) return false;
        uint32_t sum = 0;
        for (size_t i = 0; i < kSymbolsMost; i++) {
            const uint8_t frequency = from[kFrequenciesAt + i];
            if ((frequency != 0) != (i < symbols)) return false;
            sum += frequency;
        }
        return sum == kScale;
    }

    static bool begin(Out& lane, const uint8_t* at, size_t words, size_t escaped) {
        std::memcpy(lane.stream.state, at, kStatesBytes);
        if (!begins(lane.stream) || words > words_most(lane.rows * kRow)) return false;
        lane.stream.table = &lane.table;
        lane.stream.words = at + kStatesBytes;
        lane.words_end = lane.escapes = at + kStatesBytes + 2 * words;
        lane.escaped = escaped;
        lane.moved = false;
        return true;
    }

    // Writes the elements of one, two or four streams: together while all have rows, then singly.
    bool put(Out* lanes, size_t count) {
        size_t least = lanes[0].rows;
        for (size_t i = 1; i < count; i++) least = std::min(least, lanes[i].rows);
        if (!put(lanes, count, least)) return false;
        for (size_t i = 0; i < count; i++) {
            if (!put(lanes + i, 1, lanes[i].rows)) return false;
            if (!over(lanes[i])) return fail(lanes[i].number);
        }
        return true;
    }

    bool put(Out* lanes, size_t count, size_t rows) {
        Decoder* streams[kSideBySide];
        for (size_t i = 0; i < count; i++) streams[i] = &lanes[i].stream;
        for (size_t now; rows != 0; rows -= now) {
            now = std::min(rows, kTileRows);
            for (size_t i = 0; i < count; i++) {
                if (!ready(lanes[i])) return fail(lanes[i].number);
            }
            by_.decode(streams, count, now * (kRow / kLanes));
            for (size_t i = 0; i < count; i++) {
                if (!take(lanes[i], now)) return fail(lanes[i].number);
            }
        }
        return true;
    }

    // Makes all words readable that a tile may read; returns false if words are missing.
    static bool ready(Out& lane) {
        lane.stream.codes = lane.codes;
        lane.stream.next = lane.rest + kRestAhead;
        if (lane.stream.words > lane.words_end) return false;
        const auto left = static_cast<size_t>(lane.words_end - lane.stream.words);
        if (lane.moved || left >= kTileWords) return true;
        std::memcpy(lane.tail, lane.stream.words, left);
        lane.stream.words = lane.tail;
        lane.words_end = lane.tail + left;
        lane.moved = true;
        return true;
    }

    // Joins the elements of a tile while its symbols are in the cache.
    bool take(Out& lane, size_t rows) {
        const Shape shape(is_, lane.part->raw_bytes);
        uint8_t* const raw = lane.part->raw;
        if (streaming_) {
            prefetch_pages(raw + lane.first * shape.row_bytes() + kPagesAhead,
                           rows * shape.row_bytes());
        }
        const size_t used = join_rows(by_.rows[static_cast<size_t>(is_)].join, shape, lane.first,
                                      rows, kRow, lane.top, lane.last, lane.codes, lane.rest,
                                      lane.escapes, lane.escaped, raw, streaming_);
        if (used == kNoRoom) return false;
        lane.first += rows, lane.rows -= rows;
        lane.rest += rows * shape.sizes.rest_row;
        lane.escapes += used, lane.escaped -= used;
        return true;
    }

    // A valid stream ends with its last word and escape, and in the encoder's initial state.
    static bool over(const Out& lane) {
        return lane.stream.words == lane.words_end && lane.escaped == 0 && ends(lane.stream);
    }

    Element is_;
    bool streaming_;
    const Kernels& by_;
    Out* lanes_;
    size_t waiting_ = 0;
    size_t failed_ = 0;
};

// --- planes --------------------------------------------------------------------------------------

// After the element: the bytes of `second` and `third`, the escapes, and the codes of the numbers.
inline constexpr size_t kSecondAt = 4, kThirdAt = 8, kEscapesAt = 12, kCodesAt = 16;
inline constexpr size_t kPlanesHeader = kCodesAt + kPlaneNumbers;
inline constexpr uint8_t kPlaneTop = 255;  // of the codes of exponents

// The rests of a row are behind the bits, so that these can be read some bytes too far.
static_assert(kBeyond <= kRow * 3 / 8 && kRestRow<Element::kE5m2> == kRow * 3 / 8);

size_t fixed_of_planes(const Shape& shape) {
    return kPlanesHeader + shape.rows * (kFirstPlanes + shape.sizes.rest_row) + shape.odd;
}

// The codes of the numbers, from the counts of exponents; returns the numbers of all codes.
std::array<uint8_t, 256> plane_numbers(const uint32_t* counts, uint8_t* codes) {
    std::array<uint8_t, 256> order, numbers;
    size_t found = 0;
    for (size_t code = 0; code < 256; code++) {
        if (counts[kPlaneTop - code] != 0) order[found++] = static_cast<uint8_t>(code);
    }
    std::stable_sort(order.begin(), order.begin() + found, [&](uint8_t one, uint8_t other) {
        return counts[kPlaneTop - one] > counts[kPlaneTop - other];
    });
    numbers.fill(kPlaneEscape);
    std::memset(codes, 0, kPlaneNumbers);
    for (size_t i = 0, number = 0; i < found && number < kPlaneEscape; i++, number++) {
        if (number == 3) number = 5;
        codes[number] = order[i];
        numbers[order[i]] = static_cast<uint8_t>(number);
    }
    return numbers;
}

// Returns the encoded size, or kNoRoom if it is not smaller than the part.
size_t encode_planes(Element is, const Encoded& part, uint8_t* out) {
    const Shape shape(is, part.raw_bytes);
    const size_t fixed = fixed_of_planes(shape);
    if (shape.whole == 0 || fixed >= part.raw_bytes) return kNoRoom;
    const RowKernels& by = kernels().rows[static_cast<size_t>(is)];
    uint32_t counts[256];
    count(by, part.raw, shape, kR32SampleLeast, kR32SampleOneIn, counts);
    std::memset(out, 0, kPlanesHeader);
    const auto numbers = plane_numbers(counts, out + kCodesAt);
    // As much as there can be of each, and what is written beyond the last bits.
    thread_local std::vector<uint8_t> room;
    const size_t second_most = shape.rows * kRow * 2 / 8 + 8,
                 third_most = shape.rows * kRow * 3 / 8 + 8;
    const size_t rest_bytes = shape.rows * shape.sizes.rest_row;
    room.resize(second_most + third_most + shape.rows * kRow + rest_bytes);
    uint8_t* const second = room.data();
    uint8_t* const third = second + second_most;
    uint8_t* const escapes = third + third_most;
    uint8_t* const rest = escapes + shape.rows * kRow;
    PlaneWriter to = {numbers.data(), out + kPlanesHeader, {second}, {third}, escapes};
    uint8_t codes[kTileRows * kRow], zeros[kTileRows * kRow];
    for (size_t first = 0; first < shape.rows; first += kTileRows) {
        const size_t rows = std::min(kTileRows, shape.rows - first);
        split_rows(is, by.split, shape, part.raw, part.raw, first, rows, kRow, kPlaneTop, kPlaneTop,
                   codes, rest + first * shape.sizes.rest_row, zeros, sizeof zeros, false);
        kernels().pack_planes(to, codes, rows);
    }
    const size_t bytes[3] = {static_cast<size_t>(to.second.finish() - second),
                             static_cast<size_t>(to.third.finish() - third),
                             static_cast<size_t>(to.escapes - escapes)};
    const size_t size = fixed + bytes[0] + bytes[1] + bytes[2];
    if (size >= part.raw_bytes) return kNoRoom;
    out[kElementAt] = static_cast<uint8_t>(is);
    put32(out + kSecondAt, bytes[0]);
    put32(out + kThirdAt, bytes[1]);
    put32(out + kEscapesAt, bytes[2]);
    uint8_t* at = out + kPlanesHeader + shape.rows * kFirstPlanes;
    const auto put = [&](const uint8_t* from, size_t nbytes) {
        std::memcpy(at, from, nbytes);
        at += nbytes;
    };
    put(second, bytes[0]);
    put(third, bytes[1]);
    put(rest, rest_bytes);
    put(escapes, bytes[2]);
    put(part.raw + part.raw_bytes - shape.odd, shape.odd);
    return size;
}

size_t decode(Element element, std::span<const Decoded> parts, bool streaming) {
    R32Reader reader(element, streaming);
    CalibratedReader steps(element, streaming);
    for (size_t i = 0; i < parts.size(); i++) {
        const Decoded& part = parts[i];
        switch (part.codec) {
            case Codec::kRaw:
                if (part.bytes != part.raw_bytes) return i;
                put_bytes(part.raw, part.from, part.bytes, streaming);
                break;
            case Codec::kFix4:
                if (!decode_fix4(element, part, streaming)) return i;
                break;
            case Codec::kR32:
                if (i + kSideBySide < parts.size()) reader.prefetch(parts[i + kSideBySide]);
                if (!reader.add(part, i)) return reader.failed();
                break;
            case Codec::kPlanes:
                if (!decode_planes(
                        element, part,
                        [&, to = part.raw](auto* from, size_t nbytes) mutable {
                            put_bytes(to, from, nbytes, streaming);
                            to += nbytes;
                        },
                        nullptr)) {
                    return i;
                }
                break;
            case Codec::kEcsq:
            case Codec::kCachegen:
                if (!steps.add(part, i)) return steps.failed();
                break;
            default:
                if (fixed_rate(part.codec) == 0 || !decode_quantized(element, part, streaming)) {
                    return i;
                }
        }
    }
    if (!reader.flush()) return reader.failed();
    return steps.flush() ? parts.size() : steps.failed();
}

}  // namespace

bool decode_planes(Element is, const Decoded& part, const Emit& emit, const Lend& lend) {
    static constexpr uint8_t kZeros[kTileRows * kRow] = {};  // the exponents of the code 255
    const Shape shape(is, part.raw_bytes);
    const size_t fixed = fixed_of_planes(shape);
    if (part.bytes < fixed || part.from[kElementAt] != static_cast<uint8_t>(is)) return false;
    const uint64_t second = get32(part.from + kSecondAt), third = get32(part.from + kThirdAt);
    const uint64_t escaped = get32(part.from + kEscapesAt);
    if (second + third + escaped != part.bytes - fixed) return false;
    const uint8_t* const bits = part.from + kPlanesHeader + shape.rows * kFirstPlanes;
    const uint8_t* rest = bits + second + third;
    PlaneReader from = {{},
                        part.from + kPlanesHeader,
                        {bits, 0, 8 * second},
                        {bits + second, 0, 8 * third},
                        rest + shape.rows * shape.sizes.rest_row,
                        escaped,
                        part.from + part.bytes,  // where the next part begins
                        part.bytes / std::max<size_t>(1, shape.rows)};
    std::memcpy(from.codes, part.from + kCodesAt, kPlaneNumbers);
    const Kernels& by = kernels();
    uint8_t codes[kTileRows * kRow];
    alignas(64) uint8_t tile[kTileRows * kRowMost];
    size_t left = shape.elements * shape.sizes.bytes;
    const bool is_lent = lend != nullptr && is == Element::kBf16 && by.digest_planes != nullptr;
    for (size_t first = 0, rows; first < shape.rows; first += rows) {
        const LentDigest lent = is_lent ? lend(2 * (shape.whole - first)) : LentDigest{};
        if (lent.lines != 0) {
            rows = lent.lines / 2;
            if (!by.digest_planes(from, rest, lent)) return false;
            left -= rows * shape.row_bytes();
        } else {
            rows = std::min(kTileRows, shape.rows - first);
            if (!by.unpack_planes(from, codes, rows)) return false;
            by.rows[static_cast<size_t>(is)].join(codes, rest, kZeros, sizeof kZeros, kPlaneTop,
                                                  kPlaneTop, rows, tile, false);
            const size_t some = std::min(left, rows * shape.row_bytes());
            emit(tile, some);
            left -= some;
        }
        rest += rows * shape.sizes.rest_row;
    }
    emit(part.from + part.bytes - shape.odd, shape.odd);
    const bool is_over = from.second.end - from.second.at < 8 && from.third.end - from.third.at < 8;
    return is_over && from.escaped == 0;
}

const Kernels& kernels() { return KVTIER_LEVELS(kPlain, kKernelsAvx2, kKernelsVbmi); }

void make_table(const uint8_t* frequencies, size_t symbols, EncodeTable& table) {
    std::memset(&table, 0, sizeof table);
    uint32_t start = 0;
    for (size_t i = 0; i < symbols; i++) {
        const Symbol symbol = symbol_of(frequencies[i], start);
        table.reciprocal[i] = symbol.reciprocal;
        table.packed[i] = symbol.frequency | symbol.bias << 9 | symbol.shift << 20;
        table.gain[i] = static_cast<uint16_t>(kScale - symbol.frequency);
        table.corrected[i] = static_cast<uint16_t>(symbol.shift | symbol.bias << kShiftBits);
        table.fill[i] = symbol.frequency << 23;
        start += frequencies[i];
    }
}

size_t encode(Codec codec, Element element, std::span<Encoded> parts, uint8_t* out) {
    size_t total = 0;
    for (const Encoded& part : parts) total += part.raw_bytes;
    const bool streaming = total >= kStreamingLeast;
    uint8_t* at = out;
    if (codec == Codec::kR32) {
        R32Writer writer(element, streaming, out);
        for (size_t i = 0; i < parts.size(); i++)
            writer.add(parts[i], ahead(parts, i, kInTogether));
        at = writer.finish();
    } else if (calibrated(codec)) {
        at = encode_calibrated(codec, element, parts, streaming, out);
    } else {
        for (size_t i = 0; i < parts.size(); i++) {
            Encoded& part = parts[i];
            size_t size = kNoRoom;
            if (codec == Codec::kFix4) {
                size = encode_fix4(element, part.raw, part.raw_bytes, ahead(parts, i, 1), streaming,
                                   at);
            } else if (codec == Codec::kPlanes) {
                size = encode_planes(element, part, at);
            } else if (codec != Codec::kRaw) {
                size = encode_quantized(codec, element, part, streaming, at);
            }
            if (size == kNoRoom) {
                at += keep_raw(part, at);
            } else {
                part.codec = codec;
                part.bytes = size;
                at += size;
            }
        }
    }
    if (streaming) stream_fence();
    return static_cast<size_t>(at - out);
}

size_t decode(Element element, std::span<const Decoded> parts) {
    size_t total = 0;
    for (const Decoded& part : parts) total += part.raw_bytes;
    const bool streaming = total >= kStreamingLeast;
    const size_t decoded = decode(element, parts, streaming);
    if (streaming) stream_fence();
    return decoded;
}

}  // namespace kvtier::codec
