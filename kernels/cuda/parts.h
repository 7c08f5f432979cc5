// Parts of blocks on a device, and the common code of the codecs' kernels. The host divides parts
// into units; a warp processes a unit. Encoding has two passes: the first finds the encoded size of
// each unit and whether a part can be encoded, the second writes everything to its final position.
#pragma once

#include <cstddef>
#include <cstdint>

#include "addresses.h"
#include "codec/part.h"
#include "lanes.h"

namespace kvtier::cuda {

using codec::Element;
using codec::kBytes;

// At any address, lowest byte first.
KVTIER_DEVICE uint32_t get16(const uint8_t* from) {
    return static_cast<uint32_t>(from[0]) | static_cast<uint32_t>(from[1]) << 8;
}
KVTIER_DEVICE uint32_t get32(const uint8_t* from) { return get16(from) | get16(from + 2) << 16; }
// Eight bytes at any address. Three bytes before them are readable, and those before `end`.
KVTIER_DEVICE uint64_t get64(const uint8_t* from, const uint8_t* end) {
    const uint32_t skipped = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) % 8;
    if (skipped == 0) return load<uint64_t>(from);
    if (end - from < 12) return get32(from) | uint64_t{get32(from + 4)} << 32;
    const uint8_t* const words = from - skipped % 4;
    const uint64_t low = load<uint32_t>(words), middle = load<uint32_t>(words + 4);
    const uint32_t bits = skipped % 4 * 8;
    if (bits == 0) return low | middle << 32;
    const uint64_t high = load<uint32_t>(words + 8);
    return (low | middle << 32) >> bits | high << (64 - bits);
}
KVTIER_DEVICE void put16(uint8_t* to, uint32_t value) {
    to[0] = static_cast<uint8_t>(value), to[1] = static_cast<uint8_t>(value >> 8);
}
KVTIER_DEVICE void put32(uint8_t* to, uint64_t value) {
    put16(to, static_cast<uint32_t>(value)), put16(to + 2, static_cast<uint32_t>(value >> 16));
}

// Eight elements. The address is a multiple of their size, or of 16.
template <typename Bits>
KVTIER_DEVICE void store_eight(uint8_t* to, const Bits (&elements)[8]) {
    constexpr uint32_t kSize = sizeof(Bits), kWords = 2 * kSize, kOfWord = 4 / kSize;
    uint32_t words[kWords] = {};
    KVTIER_UNROLLED
    for (uint32_t k = 0; k < 8; k++) {
        words[k / kOfWord] |= uint32_t{elements[k]} << (k % kOfWord * kSize * 8);
    }
    if constexpr (kWords == 2) {
        store(to, words[0] | uint64_t{words[1]} << 32);
    } else {
        KVTIER_UNROLLED
        for (uint32_t k = 0; k < kWords; k += 4) {
            store(to + 4 * k, uint4{words[k], words[k + 1], words[k + 2], words[k + 3]});
        }
    }
}

KVTIER_DEVICE void copy(uint8_t* to, const uint8_t* from, uint64_t nbytes) {
    for (uint64_t first = 0; first < nbytes; first += kLanes) {
        each([&](uint32_t lane) {
            if (first + lane < nbytes) to[first + lane] = from[first + lane];
        });
    }
}

// The range [first, end) of `count` items that belongs to one unit, in whole pieces.
struct Share {
    uint64_t first, end;
    KVTIER_DEVICE Share(uint64_t count, uint32_t unit, uint32_t units, uint64_t piece) {
        const uint64_t each = ((count + units - 1) / units + piece - 1) / piece * piece;
        first = unit * each < count ? unit * each : count;
        end = first + each < count ? first + each : count;
    }
};

KVTIER_DEVICE void copy_share(uint8_t* to, const uint8_t* from, uint64_t nbytes, uint32_t unit,
                              uint32_t units) {
    const Share share(nbytes, unit, units, 128);
    copy(to + share.first, from + share.first, share.end - share.first);
}

template <Element kIs>
struct Of {
    static constexpr Element kElement = kIs;
};
#define KVTIER_IS decltype(is)::kElement

// Calls `act` with the part's type; returns false for other types.
template <typename Act>
KVTIER_DEVICE bool of_floats(const Part& part, Act act) {
    switch (static_cast<Element>(part.element)) {
        case Element::kBf16:
            return act(Of<Element::kBf16>());
        case Element::kFp16:
            return act(Of<Element::kFp16>());
        case Element::kFp32:
            return act(Of<Element::kFp32>());
        default:
            return false;
    }
}
template <typename Act>
KVTIER_DEVICE bool of_elements(const Part& part, Act act) {
    switch (static_cast<Element>(part.element)) {
        case Element::kE4m3:
            return act(Of<Element::kE4m3>());
        case Element::kE5m2:
            return act(Of<Element::kE5m2>());
        default:
            return of_floats(part, act);
    }
}

KVTIER_DEVICE void fail(Result& result) {
    each([&](uint32_t lane) {
        if (lane == 0) set_flag(result.bad);
    });
}

// True if the part is known to be damaged: the same for all lanes. Another warp may set the flag
// between the reads of two lanes, and lanes that diverge never meet again in a shuffle.
KVTIER_DEVICE bool is_bad(const Result& result) {
    return ballot([&](uint32_t) { return is_set(result.bad); }) != 0;
}

// Calls `act(part, unit of it, result)` for this warp's units: it returns if the part is valid.
template <typename Act>
KVTIER_DEVICE void of_units(const Part* parts, const uint32_t* owners, uint32_t units,
                            Result* results, Act act) {
    for (uint32_t i = warp(); i < units; i += warps()) {
        const uint32_t number = owners[i];
        const Part& part = parts[number];
        if (!act(part, i - part.unit, results[number])) fail(results[number]);
    }
}

// Copies one unit of a raw part; returns false if the part has a wrong length.
KVTIER_DEVICE bool take_kept(const Part& part, uint32_t unit) {
    if (part.text_bytes != part.raw_bytes) return false;
    copy_share(at<uint8_t>(part.raw), at<const uint8_t>(part.text), part.raw_bytes, unit,
               part.units);
    return true;
}

// The position of a part's encoded bytes; null if the part is stored raw, and then this copies it.
KVTIER_DEVICE uint8_t* place_of(const Part& part, uint32_t unit, const Result& result) {
    uint8_t* const out = at<uint8_t>(part.text) + result.offset;
    if (!result.kept) return out;
    copy_share(out, at<const uint8_t>(part.raw), part.raw_bytes, unit, part.units);
    return nullptr;
}

inline constexpr uint32_t kWarps = 4;  // per thread block

#define KVTIER_KERNEL(NAME)                                                                \
    extern "C" __global__ void __launch_bounds__(128, 8)                                   \
        NAME(const Part* parts, const uint32_t* owners, uint32_t units, Measure* measures, \
             Result* results)

// The sum of the numbers of all lanes before each lane.
KVTIER_DEVICE Each<uint64_t> sums_before(Each<uint64_t>& numbers) {
    Each<uint64_t> sums = numbers;
    for (uint32_t apart = 1; apart < kLanes; apart *= 2) {
        Each<uint32_t> from;
        each([&](uint32_t lane) { from[lane] = lane - apart; });
        Each<uint64_t> earlier = shuffled(sums, from);
        each([&](uint32_t lane) {
            if (lane >= apart) sums[lane] += earlier[lane];
        });
    }
    each([&](uint32_t lane) { sums[lane] -= numbers[lane]; });
    return sums;
}

// Runs between the passes, once per payload: computes the sizes of its parts and their positions. A
// part that would not shrink is stored raw. A lane processes a part; all lanes add up the units of
// a part with many.
KVTIER_KERNEL(kvtier_settle) {
    for (uint32_t i = warp(); i < units; i += warps()) {
        const uint32_t first = owners[i], end = first + parts[first].parts;
        uint64_t offset = 0;
        for (uint32_t number = first; number < end; number += static_cast<uint32_t>(kLanes)) {
            const auto is_encoded = [&](uint32_t lane) {
                return number + lane < end && !parts[number + lane].kept &&
                       !results[number + lane].bad;
            };
            Each<uint64_t> bytes;
            each([&](uint32_t lane) {
                bytes[lane] = 0;
                if (!is_encoded(lane)) return;
                const Part& part = parts[number + lane];
                if (part.units > kLanes) return;
                for (uint32_t unit = part.unit; unit < part.unit + part.units; unit++) {
                    bytes[lane] += measures[unit].bytes;
                }
            });
            uint32_t large = ballot([&](uint32_t lane) {
                return is_encoded(lane) && parts[number + lane].units > kLanes;
            });
            for (uint32_t one = 0; large != 0; large >>= 1, one++) {
                if (large % 2 == 0) continue;
                const Part& part = parts[number + one];
                const uint64_t all = sum([&](uint32_t lane) {
                    uint64_t found = 0;
                    for (uint32_t unit = lane; unit < part.units; unit += kLanes) {
                        found += measures[part.unit + unit].bytes;
                    }
                    return found;
                });
                each([&](uint32_t lane) {
                    if (lane == one) bytes[lane] = all;
                });
            }
            each([&](uint32_t lane) {
                if (number + lane >= end) return;
                Result& result = results[number + lane];
                const uint64_t raw_bytes = parts[number + lane].raw_bytes;
                result.kept = !is_encoded(lane) || bytes[lane] >= raw_bytes;
                if (result.kept) bytes[lane] = raw_bytes;
                result.bytes = bytes[lane];
            });
            Each<uint64_t> before = sums_before(bytes);
            each([&](uint32_t lane) {
                if (number + lane < end) results[number + lane].offset = offset + before[lane];
            });
            offset += sum([&](uint32_t lane) { return bytes[lane]; });
        }
    }
}

}  // namespace kvtier::cuda
