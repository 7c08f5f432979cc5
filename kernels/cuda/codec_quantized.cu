// q8, q4, q2 and fp8 on a device, bit for bit as in docs/formats.md. A unit is 4,096 elements of a
// part. The encoder's scratch: the lines of steps, as they are written.

#include "codec/quantized.h"
#include "lanes.h"
#include "parts.h"

namespace kvtier::cuda::quantized {
namespace {

using codec::kQuantizedHeader;
using codec::kUnit;
using codec::Steps;
using codec::Value;

constexpr uint32_t kUnitElements = 4096;
constexpr uint32_t kGroupMost = static_cast<uint32_t>(codec::kGroupChannels);
constexpr uint32_t kSpan = static_cast<uint32_t>(codec::kGroupTokens);
constexpr uint32_t kWarp = static_cast<uint32_t>(kLanes);

// The sizes of a part, if it has the layout of the grid. Parts are smaller than 2^31 bytes.
struct Plan {
    uint64_t size = 0;  // zero if the part cannot be encoded
    uint32_t elements = 0, lines = 0, params = 0;
    uint32_t spans = 0, line = 0, group = 0, groups = 0;  // lines per matrix, steps per line
    uint32_t matrix_rows, channels, head, bits;
    bool floating, by_token;

    KVTIER_DEVICE Plan(const Part& part, uint32_t width, uint32_t rows_, uint32_t channels_,
                       uint32_t head_, bool by_token_)
        : matrix_rows(rows_),
          channels(channels_),
          head(head_),
          bits(part.bits & ~codec::kFloating),
          floating((part.bits & codec::kFloating) != 0),
          by_token(by_token_) {
        const uint32_t raw_bytes = static_cast<uint32_t>(part.raw_bytes);
        if (matrix_rows == 0 || channels == 0 || head == 0 || channels > codec::kChannelsMost ||
            channels % head != 0 || uint64_t{matrix_rows} * channels * width > raw_bytes) {
            return;
        }
        const uint32_t matrix = matrix_rows * channels * width;
        if (raw_bytes % matrix != 0) return;
        elements = raw_bytes / width;
        groups = (head + kGroupMost - 1) / kGroupMost;  // per head
        group = (head + groups - 1) / groups;
        spans = (matrix_rows + kSpan - 1) / kSpan;
        line = by_token ? channels / head * groups : channels;
        lines = by_token ? elements / channels : raw_bytes / matrix * spans;
        params = lines * line * (bits == 8 ? 2 : 4);
        size =
            kQuantizedHeader + params + (uint64_t{elements} + kUnit - 1) / kUnit * kUnit * bits / 8;
    }

    // The steps that an element uses.
    struct Owner {
        uint32_t line, step;
    };
    KVTIER_DEVICE Owner owner(uint32_t element) const {
        const uint32_t row = element / channels, channel = element % channels;
        if (by_token) return {row, channel / head * groups + channel % head / group};
        return {row / matrix_rows * spans + row % matrix_rows / kSpan, channel};
    }
    KVTIER_DEVICE uint64_t place(uint32_t in_line, uint32_t step) const {
        return uint64_t{in_line} * line * (bits == 8 ? 2 : 4) + 2 * step;
    }
    KVTIER_DEVICE Steps steps(const uint8_t* from, const Owner& is) const {
        const uint8_t* const at = from + place(is.line, is.step);
        if (bits == 8) {
            const float step = codec::float_of(get16(at) << 16);
            return {codec::base_of(step), step};
        }
        return {codec::float_of(get16(at) << 16), codec::float_of(get16(at + 2 * line) << 16)};
    }
    KVTIER_DEVICE bool steps_of(uint32_t largest, float least, float most, Steps& is) const {
        return floating ? codec::float_steps_of(largest, least, most, is)
                        : codec::steps_of(bits, largest, least, most, is);
    }
    KVTIER_DEVICE uint32_t code_of(float value, const Steps& is) const {
        const float inverse = codec::inverse_of(is.step);
        return floating ? codec::e4m3_of(value * inverse) : codec::code_of(value, is.base, inverse);
    }
    KVTIER_DEVICE float value_of(uint8_t code, const Steps& is) const {
        return floating ? codec::float_of_e4m3(code) * is.step
                        : codec::value_of(code, is.base, is.step);
    }
    KVTIER_DEVICE void put(uint8_t* to, const Owner& owner, const Steps& is) const {
        uint8_t* const at = to + place(owner.line, owner.step);
        if (bits != 8) put16(at, codec::bits_of(is.base) >> 16);
        put16(bits == 8 ? at : at + 2 * line, codec::bits_of(is.step) >> 16);
    }
};

// Code i of a unit of 64 codes.
KVTIER_DEVICE uint32_t code_at(uint32_t bits, const uint8_t* codes, uint32_t i) {
    const uint32_t packed = static_cast<uint32_t>(kUnit) * bits / 8;
    return codes[i % packed] >> (i / packed * bits) & ((1u << bits) - 1);
}

template <Element kIs>
KVTIER_DEVICE bool decode(const Part& part, uint32_t unit) {
    using Bits = typename Value<kIs>::Bits;
    if (part.text_bytes < kQuantizedHeader) return false;
    const uint8_t* const from = at<const uint8_t>(part.text);
    const Plan plan(part, kBytes<kIs>, get32(from + codec::kRowsAt),
                    get32(from + codec::kChannelsAt), get32(from + codec::kHeadAt),
                    from[codec::kByTokenAt] != 0);
    if (plan.size == 0 || plan.size != part.text_bytes || from[codec::kByTokenAt] > 1 ||
        from[3] != 0 || from[codec::kElementAt] != static_cast<uint8_t>(kIs) ||
        from[codec::kBitsAt] != part.bits) {
        return false;
    }
    const uint8_t* const params = from + kQuantizedHeader;
    uint8_t* const out = at<uint8_t>(part.raw);
    const uint32_t first = unit * kUnitElements;
    for (uint32_t i = first; i < first + kUnitElements && i < plan.elements; i += kWarp) {
        const uint8_t* const codes = params + plan.params + i / kUnit * kUnit * plan.bits / 8;
        each([&](uint32_t lane) {
            if (i + lane >= plan.elements) return;
            const uint32_t code = code_at(plan.bits, codes, (i + lane) % kUnit);
            const Steps steps = plan.steps(params, plan.owner(i + lane));
            const float value = plan.value_of(static_cast<uint8_t>(code), steps);
            store<Bits>(out + uint64_t{i + lane} * kBytes<kIs>, Value<kIs>::narrowed(value));
        });
    }
    return true;
}

template <Element kIs>
KVTIER_DEVICE typename Value<kIs>::Order ordered(const uint8_t* in, uint64_t i) {
    return codec::turned(load<typename Value<kIs>::Order>(in + i * kBytes<kIs>));
}
template <Element kIs>
KVTIER_DEVICE float unordered(typename Value<kIs>::Order order) {
    return Value<kIs>::widened(static_cast<typename Value<kIs>::Bits>(codec::turned(order)));
}

// The minimum and maximum of the elements of each lane: all channels of a group (the same in every
// lane), or all tokens of a channel.
struct Range {
    float least, most;
};
template <Element kIs>
KVTIER_DEVICE void group_ranges(const uint8_t* in, uint32_t start, uint32_t count,
                                Each<Range>& ranges) {
    using Order = typename Value<kIs>::Order;
    const auto best = [&](auto better) {
        return static_cast<Order>(joined<int32_t>(
            [&](uint32_t lane) {
                int32_t found = ordered<kIs>(in, start);
                for (uint32_t i = lane; i < count; i += kWarp) {
                    found = better(found, ordered<kIs>(in, start + i));
                }
                return found;
            },
            better));
    };
    const Order least = best([](int32_t a, int32_t b) { return b < a ? b : a; });
    const Order most = best([](int32_t a, int32_t b) { return a < b ? b : a; });
    each([&](uint32_t lane) { ranges[lane] = {unordered<kIs>(least), unordered<kIs>(most)}; });
}
template <Element kIs>
KVTIER_DEVICE void channel_ranges(const uint8_t* in, const Plan& plan, uint32_t first,
                                  uint32_t count, uint32_t channel, Each<Range>& ranges) {
    using Order = typename Value<kIs>::Order;
    each([&](uint32_t lane) {
        if (channel + lane >= plan.channels) return;
        uint32_t i = first * plan.channels + channel + lane;
        Order least = ordered<kIs>(in, i), most = least;
        for (uint32_t row = 1; row < count; row++) {
            i += plan.channels;
            const Order one = ordered<kIs>(in, i);
            least = one < least ? one : least;
            most = one > most ? one : most;
        }
        ranges[lane] = {unordered<kIs>(least), unordered<kIs>(most)};
    });
}

// Writes the steps of this unit's groups to the scratch; false if a group has no valid steps.
KVTIER_DEVICE bool measure(const Part& part, uint32_t unit, Measure& measured) {
    const bool wide = part.element == static_cast<uint32_t>(Element::kFp32);
    const uint32_t largest = part.element == static_cast<uint32_t>(Element::kFp16)
                                 ? Value<Element::kFp16>::kLargest
                             : wide ? Value<Element::kFp32>::kLargest
                                    : Value<Element::kBf16>::kLargest;
    const Plan plan(part, wide ? 4 : 2, part.rows, part.channels, part.head, part.by_token != 0);
    if (plan.size == 0 || plan.size >= part.raw_bytes) return false;
    const uint8_t* const in = at<const uint8_t>(part.raw);
    uint8_t* const params = at<uint8_t>(part.scratch);
    // The steps of a line are computed by one warp, or by 32 warps.
    const uint32_t tile = plan.by_token ? 1 : kWarp;
    const uint32_t tiles = (plan.line + tile - 1) / tile;
    for (uint32_t item = unit; item < plan.lines * tiles; item += part.units) {
        const uint32_t line = item / tiles, step = item % tiles * tile;
        Each<Range> ranges;
        const bool known = of_floats(part, [&](auto is) {
            if (plan.by_token) {
                const uint32_t within = step % plan.groups * plan.group;
                const uint32_t left = plan.head - within;
                group_ranges<KVTIER_IS>(
                    in, line * plan.channels + step / plan.groups * plan.head + within,
                    left < plan.group ? left : plan.group, ranges);
            } else {
                const uint32_t skipped = line % plan.spans * kSpan;
                const uint32_t left = plan.matrix_rows - skipped;
                channel_ranges<KVTIER_IS>(in, plan, line / plan.spans * plan.matrix_rows + skipped,
                                          left < kSpan ? left : kSpan, step, ranges);
            }
            return true;
        });
        const uint32_t none = ballot([&](uint32_t lane) {
            if (lane >= tile || step + lane >= plan.line) return false;
            Steps steps = {};
            if (!plan.steps_of(largest, ranges[lane].least, ranges[lane].most, steps)) {
                return true;
            }
            plan.put(params, {line, step + lane}, steps);
            return false;
        });
        if (!known || none != 0) return false;
    }
    each([&](uint32_t lane) {
        if (lane == 0) measured = {0, 0, unit == 0 ? plan.size : 0};
    });
    return true;
}

template <Element kIs>
KVTIER_DEVICE void place(const Part& part, uint32_t unit, uint8_t* out) {
    const Plan plan(part, kBytes<kIs>, part.rows, part.channels, part.head, part.by_token != 0);
    const uint8_t* const in = at<const uint8_t>(part.raw);
    const uint8_t* const params = at<const uint8_t>(part.scratch);
    copy_share(out + kQuantizedHeader, params, plan.params, unit, part.units);
    const auto code = [&](uint32_t i) -> uint32_t {
        if (i >= plan.elements) return 0;
        const Steps steps = plan.steps(params, plan.owner(i));
        const auto bits = load<typename Value<kIs>::Bits>(in + uint64_t{i} * kBytes<kIs>);
        return plan.code_of(Value<kIs>::widened(bits), steps);
    };
    const uint32_t packed = static_cast<uint32_t>(kUnit) * plan.bits / 8;
    const uint32_t all = static_cast<uint32_t>(plan.size - kQuantizedHeader - plan.params);
    uint8_t* const codes = out + kQuantizedHeader + plan.params;
    const uint32_t first = unit * (kUnitElements / 8 * plan.bits);
    const uint32_t end = first + kUnitElements / 8 * plan.bits;
    for (uint32_t i = first; i < end && i < all; i += kWarp) {
        each([&](uint32_t lane) {
            const uint32_t byte = i + lane;
            if (byte >= all) return;
            uint32_t found = 0;
            for (uint32_t k = 0; k < 8 / plan.bits; k++) {
                const uint32_t element =
                    byte / packed * static_cast<uint32_t>(kUnit) + byte % packed + k * packed;
                found |= code(element) << (k * plan.bits);
            }
            codes[byte] = static_cast<uint8_t>(found);
        });
    }
    if (unit != 0) return;
    each([&](uint32_t lane) {
        if (lane != 0) return;
        put32(out, 0);
        out[codec::kElementAt] = static_cast<uint8_t>(kIs);
        out[codec::kBitsAt] = static_cast<uint8_t>(part.bits);
        out[codec::kByTokenAt] = plan.by_token;
        put32(out + codec::kRowsAt, plan.matrix_rows);
        put32(out + codec::kChannelsAt, plan.channels);
        put32(out + codec::kHeadAt, plan.head);
    });
}

}  // namespace

KVTIER_KERNEL(kvtier_quantized_decode) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        if (part.kept) return take_kept(part, unit);
        return of_floats(part, [&](auto is) { return decode<KVTIER_IS>(part, unit); });
    });
}

KVTIER_KERNEL(kvtier_quantized_measure) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        return part.kept || measure(part, unit, measures[part.unit + unit]);
    });
}

KVTIER_KERNEL(kvtier_quantized_place) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        uint8_t* const out = place_of(part, unit, result);
        return out == nullptr || of_floats(part, [&](auto is) {
                   place<KVTIER_IS>(part, unit, out);
                   return true;
               });
    });
}

}  // namespace kvtier::cuda::quantized
