// What encodes and decodes whole frames of one lossy codec, in addition to their headers.
#pragma once

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

// Immutable, so threads share it.
struct Recipe {
    Codec codec = Codec::kRaw;
    std::array<uint8_t, kProfileBytes> profile{};  // the id of the profile; zeros without one
    // For calibrated codecs: the number in `channels` for each part of a layer.
    std::shared_ptr<const std::vector<Channels>> channels;
    std::unordered_map<uint32_t, size_t> numbers;
    bool heads_first = false;
    std::optional<Order> order;  // of pages; a page is the parts of a layer

    static uint32_t place(uint16_t layer, uint8_t part) { return uint32_t{layer} << 8 | part; }
    // Returns null if the part is unknown.
    const Channels* of(uint16_t layer, uint8_t part) const {
        const auto found = numbers.find(place(layer, part));
        return found == numbers.end() ? nullptr : &(*channels)[found->second];
    }
};

// The object that Python holds; threads use its content without the GIL.
struct SharedRecipe {
    std::shared_ptr<const Recipe> shared;
};

}  // namespace kvtier::codec
