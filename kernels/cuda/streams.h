// Streams of 32 lanes, one warp per stream: the states and the next words stay in registers.
#pragma once

#include "codec/lossless.h"
#include "parts.h"

namespace kvtier::cuda {

using codec::kScale;
using codec::kStateEnd;
using codec::kStateLeast;
using codec::kStatesBytes;
using codec::kStreamEntry;
using codec::kSymbolsMost;

// The entry of a slot: symbol, frequency << 8, slot - start << 16. In shared memory.
struct DecodeSlots {
    uint32_t of[kScale];

    // From frequencies with the sum 256.
    KVTIER_DEVICE void fill(const uint8_t* frequencies) {
        each([&](uint32_t lane) {
            uint32_t start = 0;
            for (uint32_t i = 0; i < lane; i++) start += frequencies[i];
            const uint32_t frequency = frequencies[lane];
            for (uint32_t k = 0; k < frequency; k++)
                of[start + k] = lane | frequency << 8 | k << 16;
        });
    }
};

struct EncodeSymbols {
    uint32_t reciprocal[kSymbolsMost], frequency[kSymbolsMost], bias[kSymbolsMost],
        shift[kSymbolsMost];

    KVTIER_DEVICE void fill(const uint8_t* frequencies) {
        each([&](uint32_t lane) {
            uint32_t start = 0;
            for (uint32_t i = 0; i < lane; i++) start += frequencies[i];
            const codec::Symbol symbol = codec::symbol_of(frequencies[lane], start);
            reciprocal[lane] = symbol.reciprocal, frequency[lane] = symbol.frequency;
            bias[lane] = symbol.bias, shift[lane] = symbol.shift;
        });
    }
    KVTIER_DEVICE codec::Symbol operator[](uint32_t code) const {
        return {reciprocal[code], frequency[code], bias[code], shift[code]};
    }
};

// The position of a stream in its part.
struct StreamPosition {
    uint64_t before;  // the words and escapes of earlier streams, in bytes
    uint32_t words, escapes;
};

// From the part's entries; `left`: the size of all words and escapes. False if that is wrong.
KVTIER_DEVICE bool find_stream(const uint8_t* entries, uint64_t streams, uint32_t number,
                               uint64_t escape_bytes, uint64_t left, StreamPosition& lies) {
    uint64_t all = 0;
    lies = {0, 0, 0};
    for (uint64_t first = 0; first < streams; first += kLanes) {
        const auto bytes_of = [&](uint64_t i) {
            const uint8_t* const entry = entries + i * kStreamEntry;
            return 2 * uint64_t{get32(entry)} + escape_bytes * get32(entry + 4);
        };
        all += sum([&](uint32_t lane) {
            return first + lane < streams ? bytes_of(first + lane) : uint64_t{0};
        });
        lies.before += sum([&](uint32_t lane) {
            return first + lane < number ? bytes_of(first + lane) : uint64_t{0};
        });
    }
    if (all != left) return false;
    if (number < streams) {
        lies.words = get32(entries + number * kStreamEntry);
        lies.escapes = get32(entries + number * kStreamEntry + 4);
    }
    return true;
}

// A stream that is being decoded. Lanes take words in order from a window of 64, two per lane.
class StreamReader {
 public:
    KVTIER_DEVICE StreamReader(const DecodeSlots& slots, const uint8_t* from, uint32_t words)
        : slots_(slots), from_(from + kStatesBytes), words_(words) {
        each([&](uint32_t lane) {
            state_[lane] = get32(from + 4 * lane);
            low_[lane] = word(lane);
            high_[lane] = word(static_cast<uint32_t>(kLanes) + lane);
        });
    }

    // True if an encoder could have left these states.
    KVTIER_DEVICE bool begins() {
        return ballot([&](uint32_t lane) {
                   return state_[lane] < kStateLeast || state_[lane] >= kStateEnd;
               }) == 0;
    }

    KVTIER_DEVICE void row(Each<uint32_t>& symbols) {
        each([&](uint32_t lane) {
            const uint32_t slot = slots_.of[state_[lane] & (kScale - 1)];
            symbols[lane] = slot & 255;
            state_[lane] = codec::state_after_decode(state_[lane], slot >> 8 & 255, slot >> 16);
        });
        const uint32_t low = ballot([&](uint32_t lane) { return state_[lane] < kStateLeast; });
        Each<uint32_t> place;
        each([&](uint32_t lane) { place[lane] = taken_ + before(low, lane); });
        Each<uint32_t> one = shuffled(low_, place), other = shuffled(high_, place);
        each([&](uint32_t lane) {
            const uint32_t word = place[lane] < kLanes ? one[lane] : other[lane];
            if (low >> lane & 1) state_[lane] = state_[lane] << 16 | word;
        });
        taken_ += bits_in(low);
        if (taken_ < kLanes) return;
        taken_ -= static_cast<uint32_t>(kLanes);
        first_ += static_cast<uint32_t>(kLanes);
        each([&](uint32_t lane) {
            low_[lane] = high_[lane];
            high_[lane] = word(first_ + static_cast<uint32_t>(kLanes) + lane);
        });
    }

    // A valid stream ends with its last word, in the encoder's initial state.
    KVTIER_DEVICE bool ends() {
        return first_ + taken_ == words_ &&
               ballot([&](uint32_t lane) { return state_[lane] != kStateLeast; }) == 0;
    }

 private:
    // Zeros follow the last word: a stream that uses one of them does not end with its last word.
    KVTIER_DEVICE uint32_t word(uint32_t i) const {
        return i < words_ ? get16(from_ + 2 * uint64_t{i}) : 0;
    }

    const DecodeSlots& slots_;
    const uint8_t* from_;
    uint32_t words_, first_ = 0, taken_ = 0;
    Each<uint32_t> state_, low_, high_;
};

// A stream that is being encoded, from its end to its start: its words and escapes grow down from
// the ends of their buffers.
template <typename Escape>
class StreamWriter {
 public:
    static constexpr uint64_t kEscapesAt = 2 * codec::kStreamWords;
    static constexpr uint64_t kRoom =
        kEscapesAt + sizeof(Escape) * codec::kStreamRows * codec::kRow + kStatesBytes;

    KVTIER_DEVICE StreamWriter(const EncodeSymbols& symbols, uint8_t* room)
        : symbols_(symbols), room_(room) {
        each([&](uint32_t lane) { state_[lane] = kStateLeast; });
    }

    // Encodes the row before; stores the escapes of lanes whose bit is set in `escaped`.
    KVTIER_DEVICE void row(Each<uint32_t>& codes, uint32_t escaped, Each<Escape>& escapes) {
        escapes_ += bits_in(escaped);
        const uint32_t full = ballot([&](uint32_t lane) {
            return codec::needs_word(state_[lane], symbols_.frequency[codes[lane]]);
        });
        words_ += bits_in(full);
        each([&](uint32_t lane) {
            if (escaped >> lane & 1) store(escape(before(escaped, lane)), escapes[lane]);
            if (full >> lane & 1) {
                store(word(before(full, lane)), static_cast<uint16_t>(state_[lane]));
                state_[lane] >>= 16;
            }
            state_[lane] = codec::state_after_encode(state_[lane], symbols_[codes[lane]]);
        });
    }

    KVTIER_DEVICE void finish(Measure& measure, uint64_t besides) {
        each([&](uint32_t lane) {
            store(room_ + (kRoom - kStatesBytes) + 4 * lane, state_[lane]);
            if (lane != 0) return;
            measure = {words_, escapes_, besides + 2 * words_ + sizeof(Escape) * escapes_};
        });
    }

    // Writes the states, words and escapes of a finished stream to their final position.
    KVTIER_DEVICE static void place(const uint8_t* room, const Measure& measure, uint8_t* to) {
        copy(to, room + (kRoom - kStatesBytes), kStatesBytes);
        copy(to + kStatesBytes, room + kEscapesAt - 2 * uint64_t{measure.words},
             2 * uint64_t{measure.words});
        const uint64_t escapes = sizeof(Escape) * uint64_t{measure.escapes};
        copy(to + kStatesBytes + 2 * uint64_t{measure.words},
             room + (kRoom - kStatesBytes) - escapes, escapes);
    }

 private:
    KVTIER_DEVICE uint8_t* word(uint32_t i) const {
        return room_ + kEscapesAt - 2 * uint64_t{words_} + 2 * uint64_t{i};
    }
    KVTIER_DEVICE uint8_t* escape(uint32_t i) const {
        return room_ + (kRoom - kStatesBytes) - sizeof(Escape) * uint64_t{escapes_ - i};
    }

    const EncodeSymbols& symbols_;
    uint8_t* room_;
    uint32_t words_ = 0, escapes_ = 0;
    Each<uint32_t> state_;
};

// The size of the streams before this one in a part.
KVTIER_DEVICE uint64_t bytes_before(const Measure* measures, uint32_t number,
                                    uint64_t escape_bytes) {
    uint64_t found = 0;
    for (uint32_t first = 0; first < number; first += kLanes) {
        found += sum([&](uint32_t lane) {
            if (first + lane >= number) return uint64_t{0};
            const Measure& one = measures[first + lane];
            return 2 * uint64_t{one.words} + escape_bytes * one.escapes;
        });
    }
    return found;
}

}  // namespace kvtier::cuda
