// The numbers of codecs and elements in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "codec/codec.h"

namespace kvtier::codec {

inline Codec codec_of(uint32_t number) {
    const auto codec = static_cast<Codec>(number);
    if (number > 255 || (!lossless(codec) && fixed_rate(codec) == 0)) {
        throw nanobind::value_error("codec: must be 0, 1, 2, 4, 5, 6, 9, 10, 11, 12 or 13");
    }
    return codec;
}

inline Element element_of(uint32_t number) {
    if (number >= kElements) throw nanobind::value_error("element: must be 0 to 4");
    return static_cast<Element>(number);
}

}  // namespace kvtier::codec
