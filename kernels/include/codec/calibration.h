// The content of a calibration profile about the parts of a block, in the form that kernels need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/codec.h"

namespace kvtier::codec {

inline constexpr size_t kHeadMost = 4096, kHeadsMost = 1024, kGroupMost = 256;

// How K is rotated: pair j by position times turns[j], in units of 2^-64 turns.
struct Rope {
    Rope(std::vector<uint64_t> turns, bool interleaved);

    uint64_t id;  // unique
    std::vector<uint64_t> turns;
    bool interleaved;
};

// The channels of a part: tokens of `heads` heads with `dim` channels, of which the last `exact`
// are stored unchanged. For one level of one codec. Immutable, so threads share it.
struct Channels {
    // The arrays have one number per encoded channel. The constructor throws std::invalid_argument
    // if the number of entries is wrong, or if a value exceeds its limit.
    struct Parameters {
        size_t heads, dim, exact;
        std::shared_ptr<const Rope> rope;  // null without rotation
        const float* means;
        size_t means_count;
        const uint8_t *anchors, *exponents, *table;  // ecsq uses no anchors
        size_t anchors_count, exponents_count, symbols;
    };
    Channels(Codec codec, unsigned level, size_t group, const Parameters& given);

    size_t coded() const { return dim - exact; }
    size_t count() const { return heads * coded(); }

    Codec codec;
    uint8_t level;
    // Cachegen: the tokens that are encoded relative to one anchor, including the anchor.
    size_t group;
    size_t heads, dim, exact;
    std::shared_ptr<const Rope> rope;
    // The expected values, the steps, and the factors of encoders; the last two also for anchors.
    std::vector<float> means, steps, inverses, anchor_steps, anchor_inverses;
    uint8_t frequencies[kSymbolsMost] = {};
    size_t symbols;
    int reach;  // the symbol for zero, in the middle
    EncodeTable table;
};

}  // namespace kvtier::codec
