// Codecs and elements as Python numbers them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "codec/codec.h"

namespace kvtier::codec {

inline Codec codec_of(uint32_t number) {
    const auto codec = static_cast<Codec>(number);
    const bool ours = number <= static_cast<uint32_t>(Codec::kQ2) && number != 3;
    if (!ours) throw nanobind::value_error("codec: 0, 1, 2, 4, 5 or 6");
    return codec;
}

inline Element element_of(uint32_t number) {
    if (number >= kElements) throw nanobind::value_error("element: 0 to 4");
    return static_cast<Element>(number);
}

}  // namespace kvtier::codec
