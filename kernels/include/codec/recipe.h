// How whole frames of one lossy codec are made and read: what it has to know beside their headers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "codec/calibration.h"
#include "codec/codec.h"
#include "codec/reorder.h"

namespace kvtier::codec {

inline constexpr size_t kProfileBytes = 16;

// Never changes, so any threads share it.
struct Recipe {
    Codec codec = Codec::kRaw;
    std::array<uint8_t, kProfileBytes> profile{};  // its name; zeros where none is needed
    // Of the calibrated codecs: which of the channels are those of a layer's part.
    std::shared_ptr<const std::vector<Channels>> channels;
    std::unordered_map<uint32_t, size_t> numbers;
    bool heads_first = false;
    std::optional<Order> order;  // of pages, each of which is a layer's parts

    static uint32_t place(uint16_t layer, uint8_t part) { return uint32_t{layer} << 8 | part; }
    // None where nothing is known of the part.
    const Channels* of(uint16_t layer, uint8_t part) const {
        const auto found = numbers.find(place(layer, part));
        return found == numbers.end() ? nullptr : &(*channels)[found->second];
    }
};

// As Python holds one: what threads use of it needs no lock of Python's.
struct SharedRecipe {
    std::shared_ptr<const Recipe> shared;
};

}  // namespace kvtier::codec
