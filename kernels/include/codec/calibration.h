// What a calibration profile says of a block's parts, as the kernels want it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/codec.h"

namespace kvtier::codec {

inline constexpr size_t kHeadMost = 4096, kHeadsMost = 1024, kGroupMost = 256;

// How K is rotated: pair j by position times turns[j], of which 2^64 are one turn.
struct Rope {
    Rope(std::vector<uint64_t> turns, bool interleaved);

    uint64_t id;  // no other has it
    std::vector<uint64_t> turns;
    bool interleaved;
};

// Of a part: tokens of so many heads of `dim` channels, the last `exact` of which are kept as they
// are. One level of one codec. Never changes, so any threads share it.
struct Channels {
    // Arrays have a number for each channel that is encoded. Throws std::invalid_argument where
    // they have more or fewer, or where anything is beyond its limit.
    struct Said {
        size_t heads, dim, exact;
        std::shared_ptr<const Rope> rope;  // or none
        const float* means;
        size_t means_count;
        const uint8_t *anchors, *exponents, *table;  // ecsq wants no anchors
        size_t anchors_count, exponents_count, symbols;
    };
    Channels(Codec codec, unsigned level, size_t group, const Said& said);

    size_t coded() const { return dim - exact; }
    size_t count() const { return heads * coded(); }

    Codec codec;
    uint8_t level;
    size_t group;  // cachegen: tokens that are told from one anchor, itself among them
    size_t heads, dim, exact;
    std::shared_ptr<const Rope> rope;
    // Where values are expected, their steps and what encoders multiply by; the same of anchors.
    std::vector<float> means, steps, inverses, anchor_steps, anchor_inverses;
    uint8_t frequencies[kSymbolsMost] = {};
    size_t symbols;
    int reach;  // the middle symbol, which is zero
    EncodeTable table;
};

}  // namespace kvtier::codec
