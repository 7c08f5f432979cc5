// The Python bindings of the codecs, for consecutive parts of a block.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/calibration.h"
#include "codec/codec.h"
#include "codec/numbers.h"
#include "codec/recipe.h"
#include "codec/reorder.h"
#include "python_bytes.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace kvtier::codec {
namespace {

using Number = std::pair<uint32_t, size_t>;                        // codec, encoded bytes
using GridTuple = std::tuple<uint32_t, uint32_t, uint32_t, bool>;  // a Grid
using Place = std::tuple<uint32_t, size_t, size_t, size_t>;  // codec, offset, bytes, raw bytes

// The memory to read and the memory to write.
struct Ends {
    Ends(nb::handle source, const char* name, nb::handle into)
        : from(source, Access::kRead, name), to(into, Access::kWrite, "into") {}
    HeldMemory from, to;
};

// Encodes consecutive parts of a block of `bytes_of` bytes each; `fill` sets their other fields.
template <typename Said, typename BytesOf, typename Fill>
std::vector<Number> encode_all(Codec by, Element is, const Ends& ends,
                               const std::vector<Said>& said, BytesOf bytes_of, Fill fill) {
    std::vector<Encoded> parts;
    parts.reserve(said.size());
    size_t at = 0;
    for (const Said& one : said) {
        const size_t size = bytes_of(one);
        if (size > ends.from.size() - at)
            throw nb::value_error("sizes: their sum exceeds the block");
        Encoded part = {ends.from.data() + at, size, Codec::kRaw, 0};
        fill(part, one, parts.size());
        parts.push_back(part);
        at += size;
    }
    if (ends.to.size() < bound(at))
        throw nb::value_error("into: smaller than the bound of the parts");
    {
        const Unlocked unlocked;
        encode(by, is, parts, ends.to.data());
    }
    std::vector<Number> found;
    found.reserve(parts.size());
    for (const Encoded& part : parts)
        found.emplace_back(static_cast<uint32_t>(part.codec), part.bytes);
    return found;
}

// Decodes the parts at places that end like a Place; `fill` sets the other fields of a part.
template <typename At, typename Fill>
size_t decode_all(Element is, const Ends& ends, const std::vector<At>& places, Fill fill) {
    constexpr size_t kFirst = std::tuple_size_v<At> - std::tuple_size_v<Place>;
    std::vector<Decoded> parts;
    parts.reserve(places.size());
    size_t at = 0;
    for (const At& place : places) {
        const size_t offset = std::get<kFirst + 1>(place), bytes = std::get<kFirst + 2>(place);
        const size_t raw_bytes = std::get<kFirst + 3>(place);
        if (offset > ends.from.size() || bytes > ends.from.size() - offset) return parts.size();
        if (raw_bytes > ends.to.size() - at)
            throw nb::value_error("into: too small for the decoded parts");
        Decoded part = {ends.from.data() + offset, bytes, Codec::kRaw, ends.to.data() + at,
                        raw_bytes};
        fill(part, place);
        parts.push_back(part);
        at += raw_bytes;
    }
    const Unlocked unlocked;
    return decode(is, parts);
}

std::vector<Number> encode_parts(uint32_t codec, uint32_t element, nb::handle block,
                                 const std::vector<size_t>& sizes, nb::handle into,
                                 const std::vector<GridTuple>& grids) {
    const Codec by = codec_of(codec);
    const Element is = element_of(element);
    const Ends ends(block, "block", into);
    if (!grids.empty() && grids.size() != sizes.size()) {
        throw nb::value_error("grids: need one per part");
    }
    return encode_all(
        by, is, ends, sizes, [](size_t size) { return size; },
        [&](Encoded& part, size_t, size_t i) {
            if (grids.empty()) return;
            const auto& [rows, channels, head, by_token] = grids[i];
            part.grid = {rows, channels, head, by_token};
        });
}

size_t decode_parts(uint32_t element, nb::handle payload, const std::vector<Place>& places,
                    nb::handle into) {
    const Element is = element_of(element);
    const Ends ends(payload, "payload", into);
    return decode_all(is, ends, places, [](Decoded& part, const Place& place) {
        part.codec = codec_of(std::get<0>(place));
    });
}

using Turns = std::pair<nb::bytes, bool>;  // 8 bytes per pair; whether pairs are interleaved
// heads, dim, exact dims, rope or -1, means, anchors, exponents, table
using Said = std::tuple<size_t, size_t, size_t, int, nb::bytes, nb::bytes, nb::bytes, nb::bytes>;
// the number of the known part, or -1; codec, offset, bytes, raw bytes
using CalibratedPlace = std::tuple<int64_t, uint32_t, size_t, size_t, size_t>;

// One level of one calibrated codec, for the parts of a block.
class Calibration {
 public:
    Calibration(uint32_t codec, uint32_t level, size_t group, const std::vector<Turns>& ropes,
                const std::vector<Said>& parts) {
        codec_ = static_cast<Codec>(codec);
        if (codec > 8 || !calibrated(codec_)) throw nb::value_error("codec: must be 7 or 8");
        std::vector<std::shared_ptr<const Rope>> known;
        for (const auto& [text, interleaved] : ropes) {
            if (text.size() % 8 != 0) throw nb::value_error("rope: turns have 8 bytes each");
            std::vector<uint64_t> turns(text.size() / 8);
            std::memcpy(turns.data(), text.data(), 8 * turns.size());
            known.push_back(std::make_shared<const Rope>(std::move(turns), interleaved));
        }
        std::vector<Channels> made;
        made.reserve(parts.size());
        for (const auto& [heads, dim, exact, rope, means, anchors, exponents, table] : parts) {
            if (rope < -1 || rope >= static_cast<int>(known.size())) {
                throw nb::value_error("part: its rope does not exist");
            }
            if (means.size() % 4 != 0) throw nb::value_error("part: means have 4 bytes each");
            std::vector<float> numbers(means.size() / 4);
            std::memcpy(numbers.data(), means.data(), 4 * numbers.size());
            const auto bytes = [](const nb::bytes& text) {
                return reinterpret_cast<const uint8_t*>(text.c_str());
            };
            made.emplace_back(
                codec_, level, group,
                Channels::Parameters{
                    heads, dim, exact, rope < 0 ? nullptr : known[static_cast<size_t>(rope)],
                    numbers.data(), numbers.size(), bytes(anchors), bytes(exponents), bytes(table),
                    anchors.size(), exponents.size(), table.size()});
        }
        parts_ = std::make_shared<const std::vector<Channels>>(std::move(made));
    }

    // Returns null if the part is unknown.
    const Channels* part(int64_t number) const {
        if (number == -1) return nullptr;
        if (number < 0 || static_cast<uint64_t>(number) >= parts_->size()) {
            throw nb::value_error("part: the calibration does not contain it");
        }
        return &(*parts_)[static_cast<size_t>(number)];
    }
    Codec codec() const { return codec_; }
    const std::shared_ptr<const std::vector<Channels>>& parts() const { return parts_; }

 private:
    Codec codec_;
    std::shared_ptr<const std::vector<Channels>> parts_;
};

std::vector<Number> encode_calibrated_parts(const Calibration& by, uint32_t element,
                                            nb::handle block,
                                            const std::vector<std::pair<int64_t, size_t>>& sizes,
                                            bool heads_first, uint32_t position, nb::handle into) {
    const Element is = element_of(element);
    const Ends ends(block, "block", into);
    return encode_all(
        by.codec(), is, ends, sizes, [](const auto& one) { return one.second; },
        [&](Encoded& part, const auto& one, size_t) {
            part.channels = by.part(one.first);
            part.heads_first = heads_first;
            part.position = position;
        });
}

size_t decode_calibrated_parts(const Calibration& by, uint32_t element, nb::handle payload,
                               const std::vector<CalibratedPlace>& places, bool heads_first,
                               nb::handle into) {
    const Element is = element_of(element);
    const Ends ends(payload, "payload", into);
    return decode_all(is, ends, places, [&](Decoded& part, const CalibratedPlace& place) {
        const uint32_t codec = std::get<1>(place);
        const bool ours = codec == 0 || codec == static_cast<uint32_t>(by.codec());
        if (!ours) throw nb::value_error("codec: must be raw or that of the calibration");
        part.codec = static_cast<Codec>(codec);
        part.channels = by.part(std::get<0>(place));
        part.heads_first = heads_first;
    });
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

template <bool kBack>
void planes(size_t width, nb::handle src, nb::handle dst) {
    if (width != 1 && width != 2 && width != 4) throw nb::value_error("width: must be 1, 2 or 4");
    const HeldMemory from(src, Access::kRead, "src"), to(dst, Access::kWrite, "dst");
    if (from.size() != to.size() || from.size() % width != 0) {
        throw nb::value_error(
            "dst: its size differs from the source's, or is no whole number of elements");
    }
    const Unlocked unlocked;
    const size_t count = from.size() / width;
    if (width == 1) planes_of<1>(from.data(), count, to.data(), kBack);
    if (width == 2) planes_of<2>(from.data(), count, to.data(), kBack);
    if (width == 4) planes_of<4>(from.data(), count, to.data(), kBack);
}

std::vector<uint32_t> numbers_of(const nb::bytes& text, const char* name) {
    if (text.size() % sizeof(uint32_t) != 0) throw nb::value_error(name);
    std::vector<uint32_t> numbers(text.size() / sizeof(uint32_t));
    std::memcpy(numbers.data(), text.data(), text.size());
    return numbers;
}

Order order_of(size_t parts, const nb::bytes& heads, const nb::bytes& tokens,
               const nb::bytes& dims) {
    Order order{parts,
                numbers_of(heads, "heads: positions have 4 bytes each"),
                numbers_of(tokens, "tokens: positions have 4 bytes each"),
                numbers_of(dims, "dims: positions have 4 bytes each"),
                {}};
    if (!order.prepare())
        throw nb::value_error("a position is outside of its page, or belongs to two elements");
    return order;
}

void reorder_pages(size_t width, size_t parts, const nb::bytes& heads, const nb::bytes& tokens,
                   const nb::bytes& dims, nb::handle src, nb::handle dst, bool back) {
    if (width != 2 && width != 4) throw nb::value_error("width: must be 2 or 4");
    const Order order = order_of(parts, heads, tokens, dims);
    const HeldMemory from(src, Access::kRead, "src"), to(dst, Access::kWrite, "dst");
    if (from.size() != to.size() || from.size() % (order.page() * width) != 0) {
        throw nb::value_error(
            "dst: its size differs from the source's, or is no whole number of pages");
    }
    const Unlocked unlocked;
    reorder(order, width, from.data(), to.data(), from.size() / (order.page() * width), back);
}

SharedRecipe recipe_of_grids(uint32_t codec) {
    auto recipe = std::make_shared<Recipe>();
    recipe->codec = codec_of(codec);
    if (lossless(recipe->codec)) throw nb::value_error("codec: must be a lossy codec");
    return {std::move(recipe)};
}

// Layer, part, and the number of the part in the calibration.
using Numbered = std::tuple<uint16_t, uint8_t, int64_t>;

SharedRecipe recipe_by(const Calibration& by, nb::bytes profile, bool heads_first,
                       const std::vector<Numbered>& numbers) {
    if (profile.size() != kProfileBytes) throw nb::value_error("profile: must have 16 bytes");
    auto recipe = std::make_shared<Recipe>();
    recipe->codec = by.codec();
    std::memcpy(recipe->profile.data(), profile.c_str(), kProfileBytes);
    recipe->channels = by.parts();
    recipe->heads_first = heads_first;
    for (const auto& [layer, part, number] : numbers) {
        if (by.part(number) == nullptr) continue;
        recipe->numbers[Recipe::place(layer, part)] = static_cast<size_t>(number);
    }
    return {std::move(recipe)};
}

SharedRecipe recipe_of_pages(const SharedRecipe& by, size_t parts, const nb::bytes& heads,
                             const nb::bytes& tokens, const nb::bytes& dims) {
    auto recipe = std::make_shared<Recipe>(*by.shared);
    recipe->order = order_of(parts, heads, tokens, dims);
    return {std::move(recipe)};
}

}  // namespace
}  // namespace kvtier::codec

void bind_codec(nb::module_& m) {
    using namespace kvtier::codec;
    using namespace nb::literals;
    m.def("encode_parts", encode_parts, "codec"_a, "element"_a, "block"_a, "sizes"_a, "into"_a,
          "grids"_a = std::vector<GridTuple>());
    m.def("decode_parts", decode_parts, "element"_a, "payload"_a, "places"_a, "into"_a);
    nb::class_<Calibration>(m, "Calibration")
        .def(nb::init<uint32_t, uint32_t, size_t, const std::vector<Turns>&,
                      const std::vector<Said>&>(),
             "codec"_a, "level"_a, "group_tokens"_a, "ropes"_a, "parts"_a);
    nb::class_<SharedRecipe>(m, "Recipe", nb::is_final())
        .def_static("by_grids", recipe_of_grids, "codec"_a)
        .def_static("by_calibration", recipe_by, "by"_a, "profile"_a, "heads_first"_a, "numbers"_a)
        .def("of_pages", recipe_of_pages, "parts"_a, "heads"_a, "tokens"_a, "dims"_a);
    m.def("encode_calibrated", encode_calibrated_parts, "by"_a, "element"_a, "block"_a, "sizes"_a,
          "heads_first"_a, "position"_a, "into"_a);
    m.def("decode_calibrated", decode_calibrated_parts, "by"_a, "element"_a, "payload"_a,
          "places"_a, "heads_first"_a, "into"_a);
    m.def("reorder_pages", reorder_pages, "width"_a, "parts"_a, "heads"_a, "tokens"_a, "dims"_a,
          "src"_a, "dst"_a, "back"_a);
    m.def("split_planes", planes<false>, "width"_a, "src"_a, "dst"_a);
    m.def("join_planes", planes<true>, "width"_a, "src"_a, "dst"_a);
}
