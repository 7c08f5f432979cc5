// fix4 and r32 on a device, bit for bit as in docs/formats.md. A unit is 512 rows of a part; for
// r32 this is a stream. The scratch of r32's encoder: 64 bytes per part, then the memory of a
// StreamWriter for each stream; of fix4's: the 64 bytes.

#include "codec/lossless.h"
#include "lanes.h"
#include "parts.h"
#include "streams.h"

namespace kvtier::cuda::lossless {
namespace {

using codec::kCountAt;
using codec::kElementAt;
using codec::kEscape4;
using codec::kFix4Header;
using codec::kFrequenciesAt;
using codec::kR32Header;
using codec::kRow;
using codec::kRowCodes;
using codec::kStreamRows;
using codec::kSymbolsAt;
using codec::kTopAt;

constexpr uint64_t kTopRoom = 64;  // top, symbols, then frequencies
constexpr uint32_t kOfRow = static_cast<uint32_t>(kRow), kHalf = kOfRow / 2;
constexpr uint32_t kOfUnit = static_cast<uint32_t>(kStreamRows);
constexpr uint32_t kCodes = static_cast<uint32_t>(kRowCodes);  // bytes of a row
static_assert(kHalf == kLanes);
using Writer = StreamWriter<uint8_t>;

// Parts are smaller than 2^31 bytes.
template <Element kIs>
struct Shape {
    using Bits = typename codec::Form<kIs>::Bits;
    static constexpr uint32_t kRest = static_cast<uint32_t>(codec::kRestRow<kIs>);

    uint32_t elements, whole, rows, odd, streams;

    KVTIER_DEVICE explicit Shape(uint64_t raw_bytes)
        : elements(static_cast<uint32_t>(raw_bytes) / kWidth),
          whole(elements / kOfRow),
          rows((elements + kOfRow - 1) / kOfRow),
          odd(static_cast<uint32_t>(raw_bytes) % kWidth),
          streams((rows + kOfUnit - 1) / kOfUnit) {}

    KVTIER_DEVICE uint64_t fix4_bytes() const {
        return kFix4Header + uint64_t{rows} * (kCodes + kRest) + odd;
    }
    KVTIER_DEVICE uint64_t r32_bytes() const {
        return kR32Header + streams * (kStreamEntry + kStatesBytes) + uint64_t{rows} * kRest + odd;
    }
    // The first row of a unit.
    KVTIER_DEVICE uint32_t first(uint32_t unit) const { return unit * kOfUnit; }
    KVTIER_DEVICE uint32_t count(uint32_t unit) const {
        if (first(unit) >= rows) return 0;
        return rows - first(unit) < kOfUnit ? rows - first(unit) : kOfUnit;
    }

 private:
    static constexpr uint32_t kWidth = static_cast<uint32_t>(kBytes<kIs>);
};

// An element, or the padding of the last row.
template <Element kIs>
KVTIER_DEVICE typename Shape<kIs>::Bits element_at(const Part& part, const Shape<kIs>& shape,
                                                   uint32_t i, uint32_t top) {
    if (i >= shape.elements) return codec::element_of<kIs>(top, 0);
    return load<typename Shape<kIs>::Bits>(at<const uint8_t>(part.raw) + i * kBytes<kIs>);
}

// Writes the rests of some rows. A lane processes elements that share no byte with other lanes':
// two per row, or, with planes of one bit, eight consecutive ones, four rows at a time.
template <Element kIs>
KVTIER_DEVICE void put_rests(const Part& part, const Shape<kIs>& shape, uint32_t first,
                             uint32_t rows, uint32_t top, uint8_t* out) {
    constexpr bool kBitPlanes = codec::kRestBits<kIs> % 8 == 3;
    constexpr uint32_t kAtOnce = kBitPlanes ? 4 : 1;
    constexpr uint32_t kOfLane = kBitPlanes ? 8 : 2;
    constexpr uint32_t kWhole = kOfRow * (codec::kRestBits<kIs> / 8);
    for (uint32_t row = 0; row < rows; row += kAtOnce) {
        each([&](uint32_t lane) {
            const uint32_t mine = row + (kBitPlanes ? lane / 8 : 0);
            if (mine >= rows) return;
            uint8_t* const to = out + mine * Shape<kIs>::kRest;
            if constexpr (kBitPlanes) {
                for (uint32_t plane = 0; plane < 3; plane++) to[kWhole + 8 * plane + lane % 8] = 0;
            } else if constexpr (codec::kRestBits<kIs> % 8 == 4) {
                to[kWhole + lane] = 0;
            }
            for (uint32_t k = 0; k < kOfLane; k++) {
                const uint32_t i = kBitPlanes ? lane % 8 * 8 + k : lane + k * kHalf;
                const auto bits = element_at<kIs>(part, shape, (first + mine) * kOfRow + i, top);
                codec::put_rest<kIs>(to, i, codec::rest_of<kIs>(bits));
            }
        });
    }
}

// --- fix4 ----------------------------------------------------------------------------------------

KVTIER_DEVICE uint32_t fix4_code(const uint8_t* codes, uint32_t i) {
    return codes[i % kRowCodes] >> (i / kRowCodes * 4) & 15u;
}

KVTIER_DEVICE uint32_t byte_of(uint64_t bytes, uint32_t k) {
    return static_cast<uint32_t>(bytes >> 8 * k) & 255;
}

// What eight elements of a row consist of, from element i, which is a multiple of eight.
template <Element kIs>
struct EightCodes {
    static constexpr uint32_t kWhole = static_cast<uint32_t>(codec::kRestBits<kIs> / 8),
                              kUpper = static_cast<uint32_t>(codec::kRestBits<kIs> % 8);
    uint64_t codes;               // a byte each
    uint64_t planes[kWhole + 1];  // of the rests, and their upper bits

    KVTIER_DEVICE void load(const uint8_t* of_row, const uint8_t* rest, const uint8_t* end,
                            uint32_t i) {
        constexpr uint64_t kLow = 0x0F0F0F0F0F0F0F0F;
        codes = get64(of_row + i % kHalf, end) >> (i / kHalf * 4) & kLow;
        if constexpr (kWhole != 0) {
            KVTIER_UNROLLED
            for (uint32_t k = 0; k < kWhole; k++) planes[k] = get64(rest + kRow * k + i, end);
        }
        rest += kRow * kWhole;
        if constexpr (kUpper == 4) {
            planes[kWhole] = get64(rest + i % kHalf, end) >> (i / kHalf * 4) & kLow;
        } else if constexpr (kUpper == 3) {
            planes[kWhole] = rest[i / 8] | rest[8 + i / 8] << 8 | rest[16 + i / 8] << 16;
        }
    }
    KVTIER_DEVICE uint32_t rest(uint32_t k) const {
        uint32_t found = 0;
        if constexpr (kWhole != 0) {
            KVTIER_UNROLLED
            for (uint32_t plane = 0; plane < kWhole; plane++) {
                found |= byte_of(planes[plane], k) << 8 * plane;
            }
        }
        if constexpr (kUpper == 4) found |= byte_of(planes[kWhole], k) << 8 * kWhole;
        if constexpr (kUpper == 3) {
            const uint32_t upper = static_cast<uint32_t>(planes[kWhole]) >> k;
            found |= ((upper & 1) | (upper >> 7 & 2) | (upper >> 14 & 4)) << 8 * kWhole;
        }
        return found;
    }
    KVTIER_DEVICE uint32_t escapes() const {
        return bits_in((codes + 0x0101010101010101) & 0x1010101010101010);
    }
};

template <Element kIs>
KVTIER_DEVICE bool fix4_count(const Part& part, uint32_t unit, Measure& measure) {
    const Shape<kIs> shape(part.raw_bytes);
    if (part.text_bytes < shape.fix4_bytes()) return false;
    if (part.units == 1) return true;
    const uint8_t* const codes =
        at<const uint8_t>(part.text) + kFix4Header + shape.first(unit) * kRowCodes;
    const uint32_t nbytes = shape.count(unit) * kCodes;
    const auto found = static_cast<uint32_t>(sum([&](uint32_t lane) {
        uint64_t escapes = 0;
        for (uint32_t first = 8 * lane; first < nbytes; first += 8 * kHalf) {
            const uint64_t eight = get64(codes + first, codes + nbytes);
            const uint64_t pairs = eight & eight >> 1;
            escapes += bits_in(pairs & pairs >> 2 & 0x1111111111111111);
        }
        return escapes;
    }));
    each([&](uint32_t lane) {
        if (lane == 0) measure = {0, found, found};
    });
    return true;
}

template <Element kIs>
KVTIER_DEVICE bool fix4_decode(const Part& part, uint32_t unit, const Measure* measures) {
    const Shape<kIs> shape(part.raw_bytes);
    const uint64_t fixed = shape.fix4_bytes();
    const uint8_t* const from = at<const uint8_t>(part.text);
    if (part.text_bytes < fixed || from[kElementAt] != static_cast<uint8_t>(kIs)) return false;
    const uint32_t escaped = get32(from + kCountAt);
    if (part.text_bytes - fixed != escaped) return false;
    uint32_t used = 0;
    if (part.units != 1) {
        if (bytes_before(measures, part.units, 1) != escaped) return false;
        used = static_cast<uint32_t>(bytes_before(measures, unit, 1));
    }
    const uint32_t top = from[kTopAt];
    const uint8_t* const codes = from + kFix4Header + shape.first(unit) * kRowCodes;
    const uint8_t* const rest =
        from + kFix4Header + shape.rows * kRowCodes + shape.first(unit) * Shape<kIs>::kRest;
    const uint8_t* const escapes = from + (fixed - shape.odd);
    uint8_t* const out = at<uint8_t>(part.raw);
    uint32_t row = 0;
    if (kBytes<kIs> <= 2 && part.raw % 16 == 0) {
        // Four rows at a time: a lane decodes eight consecutive elements. Eight of four bytes would
        // need more registers than there are.
        constexpr uint64_t kUpperBits = 0x8080808080808080;
        const uint64_t tops = uint64_t{top} * 0x0101010101010101;
        const uint8_t* const end = from + part.text_bytes;
        const uint32_t whole = shape.whole - shape.first(unit), rows = shape.count(unit);
        for (; row + 4 <= rows && row + 4 <= whole; row += 4) {
            Each<EightCodes<kIs>> eight;
            each([&](uint32_t lane) {
                const uint32_t mine = row + lane / 8;
                eight[lane].load(codes + mine * kCodes, rest + mine * Shape<kIs>::kRest, end,
                                 lane % 8 * 8);
            });
            const uint32_t far = ballot([&](uint32_t lane) { return eight[lane].escapes() != 0; });
            Each<uint32_t> place;
            uint32_t all = 0;
            if (far != 0) {
                each([&](uint32_t lane) { place[lane] = 0; });
                for (uint32_t bit = 0; bit < 4; bit++) {
                    const uint32_t some =
                        ballot([&](uint32_t lane) { return eight[lane].escapes() >> bit & 1; });
                    each([&](uint32_t lane) { place[lane] += before(some, lane) << bit; });
                    all += bits_in(some) << bit;
                }
                if (all > escaped - used) return false;
            }
            each([&](uint32_t lane) {
                // In each byte: the top minus the code, modulo 256.
                const uint64_t eight_codes = eight[lane].codes;
                uint64_t exponents = ((tops | kUpperBits) - eight_codes) ^ (~tops & kUpperBits);
                if (far >> lane & 1) {
                    const uint8_t* next = escapes + used + place[lane];
                    for (uint32_t at = 0; at < 64; at += 8) {
                        if ((eight_codes >> at & 255) != kEscape4) continue;
                        exponents = (exponents & ~(uint64_t{255} << at)) | uint64_t{*next++} << at;
                    }
                }
                typename Shape<kIs>::Bits elements[8];
                KVTIER_UNROLLED
                for (uint32_t k = 0; k < 8; k++) {
                    elements[k] =
                        codec::element_of<kIs>(byte_of(exponents, k), eight[lane].rest(k));
                }
                const uint32_t i = (shape.first(unit) + row) * kOfRow + 8 * lane;
                store_eight(out + uint64_t{i} * kBytes<kIs>, elements);
            });
            used += all;
        }
    }
    for (uint32_t half = 2 * row; half < 2 * shape.count(unit); half++) {
        const uint8_t* const row_codes = codes + half / 2 * kRowCodes;
        const uint8_t* const row_rest = rest + half / 2 * Shape<kIs>::kRest;
        const uint32_t start = half % 2 * kHalf;
        Each<uint32_t> code;
        each([&](uint32_t lane) { code[lane] = fix4_code(row_codes, start + lane); });
        const uint32_t far = ballot([&](uint32_t lane) { return code[lane] == kEscape4; });
        if (bits_in(far) > escaped - used) return false;
        each([&](uint32_t lane) {
            const uint32_t i = shape.first(unit) * kOfRow + half * kHalf + lane;
            if (i >= shape.elements) return;
            const uint32_t exponent =
                far >> lane & 1 ? escapes[used + before(far, lane)] : (top - code[lane]) & 255;
            const uint32_t bits = codec::get_rest<kIs>(row_rest, start + lane);
            store(out + i * kBytes<kIs>, codec::element_of<kIs>(exponent, bits));
        });
        used += bits_in(far);
    }
    if (unit == 0) copy(out + part.raw_bytes - shape.odd, escapes + escaped, shape.odd);
    return part.units != 1 || used == escaped;
}

// --- counts of exponents -------------------------------------------------------------------------

// Counts the exponents of a sample of the whole rows; there is at least one.
template <Element kIs>
KVTIER_DEVICE void count(const Part& part, const Shape<kIs>& shape, size_t least, size_t one_in,
                         uint32_t* counts) {
    for (uint32_t first = 0; first < 256; first += static_cast<uint32_t>(kLanes)) {
        each([&](uint32_t lane) { counts[first + lane] = 0; });
    }
    const auto rows = static_cast<uint32_t>(codec::sampled_rows(shape.whole, least, one_in));
    for (uint32_t i = 0; i < 2 * rows; i++) {
        const auto row = static_cast<uint32_t>(codec::sampled_row(i / 2, rows, shape.whole));
        each([&](uint32_t lane) {
            const uint32_t k = row * kOfRow + i % 2 * kHalf + lane;
            const auto bits = element_at<kIs>(part, shape, k, 0);
            count_at(counts + codec::exponent_of<kIs>(bits));
        });
    }
}

// Returns false if the part must be stored raw, whatever its content is.
template <Element kIs>
KVTIER_DEVICE bool fix4_counts(const Part& part, uint32_t* counts) {
    const Shape<kIs> shape(part.raw_bytes);
    if (shape.whole == 0 || shape.fix4_bytes() >= part.raw_bytes) return false;
    count(part, shape, codec::kFix4SampleLeast, codec::kFix4SampleOneIn, counts);
    return true;
}

template <Element kIs>
KVTIER_DEVICE bool r32_counts(const Part& part, uint32_t* counts) {
    const Shape<kIs> shape(part.raw_bytes);
    if (shape.whole == 0 || shape.r32_bytes() >= part.raw_bytes) return false;
    count(part, shape, codec::kR32SampleLeast, codec::kR32SampleOneIn, counts);
    return true;
}

// --- fix4's encoder ------------------------------------------------------------------------------

template <Element kIs>
KVTIER_DEVICE bool fix4_measure(const Part& part, uint32_t unit, Measure& measure) {
    const Shape<kIs> shape(part.raw_bytes);
    const uint32_t top = *at<const uint8_t>(part.scratch);
    uint32_t found = 0;
    for (uint32_t half = 0; half < 2 * shape.count(unit); half++) {
        found += bits_in(ballot([&](uint32_t lane) {
            const uint32_t i = shape.first(unit) * kOfRow + half * kHalf + lane;
            const auto bits = element_at<kIs>(part, shape, i, top);
            return codec::code_of(codec::exponent_of<kIs>(bits), top, kEscape4) == kEscape4;
        }));
    }
    each([&](uint32_t lane) {
        if (lane == 0) measure = {0, found, found + (unit == 0 ? shape.fix4_bytes() : 0)};
    });
    return true;
}

template <Element kIs>
KVTIER_DEVICE void fix4_place(const Part& part, uint32_t unit, const Measure* measures,
                              const Result& result, uint8_t* out) {
    const Shape<kIs> shape(part.raw_bytes);
    const uint32_t top = *at<const uint8_t>(part.scratch);
    const uint32_t first = shape.first(unit), rows = shape.count(unit);
    uint8_t* const rest = out + kFix4Header + shape.rows * kRowCodes;
    uint8_t* const escapes = rest + shape.rows * Shape<kIs>::kRest;
    uint64_t used = bytes_before(measures, unit, 1);
    for (uint32_t row = 0; row < rows; row++) {
        Each<uint32_t> low, high;
        const auto exponent = [&](uint32_t i) {
            return codec::exponent_of<kIs>(
                element_at<kIs>(part, shape, (first + row) * kOfRow + i, top));
        };
        each([&](uint32_t lane) {
            low[lane] = exponent(lane), high[lane] = exponent(kHalf + lane);
            const uint32_t one = codec::code_of(low[lane], top, kEscape4);
            const uint32_t other = codec::code_of(high[lane], top, kEscape4);
            out[kFix4Header + (first + row) * kRowCodes + lane] =
                static_cast<uint8_t>(one | other << 4);
        });
        const auto put_escapes = [&](Each<uint32_t>& exponents) {
            const uint32_t far = ballot([&](uint32_t lane) {
                return codec::code_of(exponents[lane], top, kEscape4) == kEscape4;
            });
            if (far == 0) return;
            each([&](uint32_t lane) {
                if (far >> lane & 1) {
                    escapes[used + before(far, lane)] = static_cast<uint8_t>(exponents[lane]);
                }
            });
            used += bits_in(far);
        };
        put_escapes(low);
        put_escapes(high);
    }
    put_rests<kIs>(part, shape, first, rows, top, rest + first * Shape<kIs>::kRest);
    if (unit != 0) return;
    const uint64_t fixed = shape.fix4_bytes(), escaped = result.bytes - fixed;
    copy(escapes + escaped, at<const uint8_t>(part.raw) + part.raw_bytes - shape.odd, shape.odd);
    each([&](uint32_t lane) {
        if (lane != 0) return;
        put32(out, 0);
        out[kElementAt] = static_cast<uint8_t>(kIs);
        out[kTopAt] = static_cast<uint8_t>(top);
        put32(out + kCountAt, escaped);
    });
}

// --- r32 -----------------------------------------------------------------------------------------

// True if an encoder could have written these frequencies: each slot has a symbol.
KVTIER_DEVICE bool valid_frequencies(const uint8_t* from) {
    const uint32_t symbols = from[kSymbolsAt];
    if (symbols < codec::kSymbolsLeast || symbols > kSymbolsMost) return false;
    const uint8_t* const frequencies = from + kFrequenciesAt;
    const uint32_t there = ballot([&](uint32_t lane) { return frequencies[lane] != 0; });
    const uint64_t all = sum([&](uint32_t lane) { return uint64_t{frequencies[lane]}; });
    return all == kScale && there == 0xFFFFFFFFu >> (kSymbolsMost - symbols);
}

template <Element kIs>
KVTIER_DEVICE bool r32_decode(const Part& part, uint32_t unit, DecodeSlots& slots) {
    const Shape<kIs> shape(part.raw_bytes);
    const uint64_t fixed = shape.r32_bytes();
    const uint8_t* const from = at<const uint8_t>(part.text);
    if (part.text_bytes < fixed || from[kElementAt] != static_cast<uint8_t>(kIs) ||
        get32(from + kCountAt) != shape.streams || !valid_frequencies(from)) {
        return false;
    }
    StreamPosition lies;
    const uint64_t left = part.text_bytes - fixed;
    if (!find_stream(from + kR32Header, shape.streams, unit, 1, left, lies)) return false;
    uint8_t* const out = at<uint8_t>(part.raw);
    if (unit == 0) {
        copy(out + part.raw_bytes - shape.odd, from + part.text_bytes - shape.odd, shape.odd);
    }
    const uint32_t rows = shape.count(unit), first = shape.first(unit);
    if (rows == 0) return true;
    if (lies.words > codec::words_most(rows * kRow)) return false;
    const uint8_t* const rests = from + kR32Header + shape.streams * kStreamEntry;
    const uint8_t* const rest = rests + first * Shape<kIs>::kRest;
    const uint8_t* const stream =
        rests + shape.rows * Shape<kIs>::kRest + unit * kStatesBytes + lies.before;
    const uint8_t* const escapes = stream + kStatesBytes + 2 * uint64_t{lies.words};
    const uint32_t top = from[kTopAt], last = from[kSymbolsAt] - 1u;
    // The rests of the next half of a row are read while symbols are decoded.
    const auto rest_of = [&](uint32_t half, uint32_t lane) {
        return codec::get_rest<kIs>(rest + half / 2 * Shape<kIs>::kRest, half % 2 * kHalf + lane);
    };
    Each<uint32_t> next;
    each([&](uint32_t lane) { next[lane] = rest_of(0, lane); });
    slots.fill(from + kFrequenciesAt);
    StreamReader reader(slots, stream, lies.words);
    if (!reader.begins()) return false;
    uint32_t used = 0;
    for (uint32_t half = 0; half < 2 * rows; half++) {
        Each<uint32_t> code, exponent;
        reader.row(code);
        const uint32_t far = ballot([&](uint32_t lane) { return code[lane] == last; });
        each([&](uint32_t lane) { exponent[lane] = (top - code[lane]) & 255; });
        if (far != 0) {
            if (bits_in(far) > lies.escapes - used) return false;
            each([&](uint32_t lane) {
                if (far >> lane & 1) exponent[lane] = escapes[used + before(far, lane)];
            });
            used += bits_in(far);
        }
        each([&](uint32_t lane) {
            const uint32_t i = first * kOfRow + half * kHalf + lane, bits = next[lane];
            if (half + 1 < 2 * rows) next[lane] = rest_of(half + 1, lane);
            if (i >= shape.elements) return;
            store(out + i * kBytes<kIs>, codec::element_of<kIs>(exponent[lane], bits));
        });
    }
    return reader.ends() && used == lies.escapes;
}

KVTIER_DEVICE uint8_t* room_of(const Part& part, uint32_t unit) {
    return at<uint8_t>(part.scratch) + kTopRoom + unit * Writer::kRoom;
}

template <Element kIs>
KVTIER_DEVICE bool r32_measure(const Part& part, uint32_t unit, EncodeSymbols& symbols,
                               Measure& measure) {
    const Shape<kIs> shape(part.raw_bytes);
    const uint8_t* const header = at<const uint8_t>(part.scratch);
    const uint32_t top = header[0], last = header[1] - 1u;
    symbols.fill(header + 2);
    Writer writer(symbols, room_of(part, unit));
    for (uint32_t half = 2 * shape.count(unit); half-- > 0;) {
        Each<uint32_t> code;
        Each<uint8_t> exponent;
        each([&](uint32_t lane) {
            const uint32_t i = shape.first(unit) * kOfRow + half * kHalf + lane;
            const uint32_t one = codec::exponent_of<kIs>(element_at<kIs>(part, shape, i, top));
            code[lane] = codec::code_of(one, top, last);
            exponent[lane] = static_cast<uint8_t>(one);
        });
        const uint32_t far = ballot([&](uint32_t lane) { return code[lane] == last; });
        writer.row(code, far, exponent);
    }
    writer.finish(measure, unit == 0 ? shape.r32_bytes() : 0);
    return true;
}

template <Element kIs>
KVTIER_DEVICE void r32_place(const Part& part, uint32_t unit, const Measure* measures,
                             const Result& result, uint8_t* out) {
    const Shape<kIs> shape(part.raw_bytes);
    const uint8_t* const header = at<const uint8_t>(part.scratch);
    const uint32_t first = shape.first(unit);
    uint8_t* const rests = out + kR32Header + shape.streams * kStreamEntry;
    uint8_t* const streams = rests + shape.rows * Shape<kIs>::kRest;
    put_rests<kIs>(part, shape, first, shape.count(unit), header[0],
                   rests + first * Shape<kIs>::kRest);
    Writer::place(room_of(part, unit), measures[unit],
                  streams + unit * kStatesBytes + bytes_before(measures, unit, 1));
    each([&](uint32_t lane) {
        if (lane != 0) return;
        put32(out + kR32Header + unit * kStreamEntry, measures[unit].words);
        put32(out + kR32Header + unit * kStreamEntry + 4, measures[unit].escapes);
    });
    if (unit != 0) return;
    copy(out + result.bytes - shape.odd, at<const uint8_t>(part.raw) + part.raw_bytes - shape.odd,
         shape.odd);
    each([&](uint32_t lane) {
        out[kFrequenciesAt + lane] = header[2 + lane];
        if (lane != 0) return;
        put32(out, 0);
        out[kElementAt] = static_cast<uint8_t>(kIs);
        out[kTopAt] = header[0], out[kSymbolsAt] = header[1];
        put32(out + kCountAt, shape.streams);
    });
}

}  // namespace

KVTIER_KERNEL(kvtier_fix4_count) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        if (part.kept) return true;
        return of_elements(part, [&](auto is) {
            return fix4_count<KVTIER_IS>(part, unit, measures[part.unit + unit]);
        });
    });
}

KVTIER_KERNEL(kvtier_fix4_decode) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        if (part.kept) return take_kept(part, unit);
        if (is_bad(result)) return false;
        return of_elements(part, [&](auto is) {
            return fix4_decode<KVTIER_IS>(part, unit, measures + part.unit);
        });
    });
}

KVTIER_KERNEL(kvtier_r32_decode) {
    __shared__ DecodeSlots of_warps[kWarps];
    DecodeSlots& slots = of_warps[warp() % kWarps];
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        if (part.kept) return take_kept(part, unit);
        return of_elements(part, [&](auto is) { return r32_decode<KVTIER_IS>(part, unit, slots); });
    });
}

// Computes what the encoder needs of a part before its units begin.
KVTIER_KERNEL(kvtier_fix4_begin) {
    __shared__ uint32_t of_warps[kWarps][256];
    uint32_t* const counts = of_warps[warp() % kWarps];
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        if (part.kept || unit != 0) return true;
        if (!of_elements(part, [&](auto is) { return fix4_counts<KVTIER_IS>(part, counts); })) {
            return false;
        }
        each([&](uint32_t lane) {
            if (lane != 0) return;
            *at<uint8_t>(part.scratch) = static_cast<uint8_t>(codec::best_top(counts, kEscape4));
        });
        return true;
    });
}

KVTIER_KERNEL(kvtier_r32_begin) {
    __shared__ uint32_t of_warps[kWarps][256];
    uint32_t* const counts = of_warps[warp() % kWarps];
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        if (part.kept || unit != 0) return true;
        if (!of_elements(part, [&](auto is) { return r32_counts<KVTIER_IS>(part, counts); })) {
            return false;
        }
        each([&](uint32_t lane) {
            if (lane != 0) return;
            const codec::Frequencies found = codec::frequencies_of(counts);
            uint8_t* const to = at<uint8_t>(part.scratch);
            to[0] = static_cast<uint8_t>(found.top), to[1] = static_cast<uint8_t>(found.symbols);
            for (size_t i = 0; i < kSymbolsMost; i++) to[2 + i] = found.of[i];
        });
        return true;
    });
}

KVTIER_KERNEL(kvtier_fix4_measure) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        if (part.kept || is_bad(result)) return true;
        return of_elements(part, [&](auto is) {
            return fix4_measure<KVTIER_IS>(part, unit, measures[part.unit + unit]);
        });
    });
}

KVTIER_KERNEL(kvtier_r32_measure) {
    __shared__ EncodeSymbols of_warps[kWarps];
    EncodeSymbols& symbols = of_warps[warp() % kWarps];
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        if (part.kept || is_bad(result)) return true;
        return of_elements(part, [&](auto is) {
            return r32_measure<KVTIER_IS>(part, unit, symbols, measures[part.unit + unit]);
        });
    });
}

KVTIER_KERNEL(kvtier_fix4_place) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        uint8_t* const out = place_of(part, unit, result);
        return out == nullptr || of_elements(part, [&](auto is) {
                   fix4_place<KVTIER_IS>(part, unit, measures + part.unit, result, out);
                   return true;
               });
    });
}

KVTIER_KERNEL(kvtier_r32_place) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        uint8_t* const out = place_of(part, unit, result);
        return out == nullptr || of_elements(part, [&](auto is) {
                   r32_place<KVTIER_IS>(part, unit, measures + part.unit, result, out);
                   return true;
               });
    });
}

}  // namespace kvtier::cuda::lossless
