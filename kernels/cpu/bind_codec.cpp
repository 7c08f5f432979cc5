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
#include "python_bytes.h"

namespace nb = nanobind;

namespace kvtier::codec {
namespace {

using Number = std::pair<uint32_t, size_t>;                  // codec, encoded bytes
using Place = std::tuple<uint32_t, size_t, size_t, size_t>;  // codec, offset, bytes, raw bytes

Codec codec_of(uint32_t number) {
    if (number > static_cast<uint32_t>(Codec::kR32)) throw nb::value_error("codec: 0, 1 or 2");
    return static_cast<Codec>(number);
}

Element element_of(uint32_t number) {
    if (number >= kElements) throw nb::value_error("element: 0 to 4");
    return static_cast<Element>(number);
}

std::vector<Number> encode_parts(uint32_t codec, uint32_t element, nb::handle block,
                                 const std::vector<size_t>& sizes, nb::handle into) {
    const Codec by = codec_of(codec);
    const Element is = element_of(element);
    Held from, to;
    from.take(block, Access::kRead, Shape::kContiguous, "block");
    to.take(into, Access::kWrite, Shape::kContiguous, "into");
    std::vector<Encoded> parts;
    parts.reserve(sizes.size());
    size_t at = 0;
    for (const size_t size : sizes) {
        if (size > from.size() - at) throw nb::value_error("sizes: more than the block has");
        parts.push_back({from.data() + at, size, Codec::kRaw, 0});
        at += size;
    }
    if (to.size() < bound(at)) throw nb::value_error("into: smaller than the bound");
    {
        const nb::gil_scoped_release unlocked;
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
    const nb::gil_scoped_release unlocked;
    return decode(is, parts);
}

}  // namespace
}  // namespace kvtier::codec

void bind_codec(nb::module_& m) {
    using namespace kvtier::codec;
    using namespace nb::literals;
    m.def("encode_parts", encode_parts, "codec"_a, "element"_a, "block"_a, "sizes"_a, "into"_a);
    m.def("decode_parts", decode_parts, "element"_a, "payload"_a, "places"_a, "into"_a);
}
