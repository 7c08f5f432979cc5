// The codecs for Python: parts of a block that follow one another.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "codec/numbers.h"
#include "python_bytes.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace kvtier::codec {
namespace {

using Number = std::pair<uint32_t, size_t>;                  // codec, encoded bytes
using Lie = std::tuple<uint32_t, uint32_t, uint32_t, bool>;  // a Grid
using Place = std::tuple<uint32_t, size_t, size_t, size_t>;  // codec, offset, bytes, raw bytes

std::vector<Number> encode_parts(uint32_t codec, uint32_t element, nb::handle block,
                                 const std::vector<size_t>& sizes, nb::handle into,
                                 const std::vector<Lie>& grids) {
    const Codec by = codec_of(codec);
    const Element is = element_of(element);
    Held from, to;
    from.take(block, Access::kRead, Shape::kContiguous, "block");
    to.take(into, Access::kWrite, Shape::kContiguous, "into");
    std::vector<Encoded> parts;
    parts.reserve(sizes.size());
    if (!grids.empty() && grids.size() != sizes.size()) {
        throw nb::value_error("grids: not one for each part");
    }
    size_t at = 0;
    for (const size_t size : sizes) {
        if (size > from.size() - at) throw nb::value_error("sizes: more than the block has");
        Encoded part = {from.data() + at, size, Codec::kRaw, 0};
        if (!grids.empty()) {
            const auto& [rows, channels, head, by_token] = grids[parts.size()];
            part.grid = {rows, channels, head, by_token};
        }
        parts.push_back(part);
        at += size;
    }
    if (to.size() < bound(at)) throw nb::value_error("into: smaller than the bound");
    {
        const Unlocked unlocked;
        encode(by, is, parts, to.data());
    }
    std::vector<Number> found;
    found.reserve(parts.size());
    for (const Encoded& part : parts)
        found.emplace_back(static_cast<uint32_t>(part.codec), part.bytes);
    return found;
}

size_t decode_parts(uint32_t element, nb::handle payload, const std::vector<Place>& places,
                    nb::handle into) {
    const Element is = element_of(element);
    Held from, to;
    from.take(payload, Access::kRead, Shape::kContiguous, "payload");
    to.take(into, Access::kWrite, Shape::kContiguous, "into");
    std::vector<Decoded> parts;
    parts.reserve(places.size());
    size_t at = 0;
    for (const auto& [codec, offset, bytes, raw_bytes] : places) {
        if (offset > from.size() || bytes > from.size() - offset) return parts.size();
        if (raw_bytes > to.size() - at) throw nb::value_error("into: smaller than the parts");
        parts.push_back({from.data() + offset, bytes, codec_of(codec), to.data() + at, raw_bytes});
        at += raw_bytes;
    }
    const Unlocked unlocked;
    return decode(is, parts);
}

template <size_t kWidth>
void planes_of(const uint8_t* in, size_t count, uint8_t* out, bool back) {
    constexpr unsigned kBits = 8 * kWidth;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = 0;
        if (back) {
            for (size_t b = 0; b < kWidth; b++) bits |= uint32_t{in[b * count + i]} << (8 * b);
            bits = bits >> 1 | (bits & 1) << (kBits - 1);
            for (size_t b = 0; b < kWidth; b++)
                out[i * kWidth + b] = static_cast<uint8_t>(bits >> (8 * b));
        } else {
            for (size_t b = 0; b < kWidth; b++) bits |= uint32_t{in[i * kWidth + b]} << (8 * b);
            bits = bits << 1 | bits >> (kBits - 1);
            for (size_t b = 0; b < kWidth; b++)
                out[b * count + i] = static_cast<uint8_t>(bits >> (8 * b));
        }
    }
}

void planes(size_t width, nb::handle src, nb::handle dst, bool back) {
    if (width != 1 && width != 2 && width != 4) throw nb::value_error("width: 1, 2 or 4");
    Held from, to;
    from.take(src, Access::kRead, Shape::kContiguous, "src");
    to.take(dst, Access::kWrite, Shape::kContiguous, "dst");
    if (from.size() != to.size() || from.size() % width != 0) {
        throw nb::value_error("dst: not of the source's size, or not of whole elements");
    }
    const Unlocked unlocked;
    const size_t count = from.size() / width;
    if (width == 1) planes_of<1>(from.data(), count, to.data(), back);
    if (width == 2) planes_of<2>(from.data(), count, to.data(), back);
    if (width == 4) planes_of<4>(from.data(), count, to.data(), back);
}

}  // namespace
}  // namespace kvtier::codec

void bind_codec(nb::module_& m) {
    using namespace kvtier::codec;
    using namespace nb::literals;
    m.def("encode_parts", encode_parts, "codec"_a, "element"_a, "block"_a, "sizes"_a, "into"_a,
          "grids"_a = std::vector<Lie>());
    m.def("decode_parts", decode_parts, "element"_a, "payload"_a, "places"_a, "into"_a);
    m.def(
        "split_planes",
        [](size_t width, nb::handle src, nb::handle dst) { planes(width, src, dst, false); },
        "width"_a, "src"_a, "dst"_a);
    m.def(
        "join_planes",
        [](size_t width, nb::handle src, nb::handle dst) { planes(width, src, dst, true); },
        "width"_a, "src"_a, "dst"_a);
}
