// The codecs with a fixed rate on a device, bit for bit as in docs/formats.md. A unit is 4,096
// elements of a part. The encoder's scratch: the lines of steps, as they are written; for nvfp4 and
// mxfp4 the largest magnitude of each unit (4 bytes), then that of each group.

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
constexpr uint32_t kWarp = static_cast<uint32_t>(kLanes);

// The sizes of a part, if it has the layout of the grid. Parts are smaller than 2^31 bytes.
struct Plan {
    uint64_t size = 0;  // zero if the part cannot be encoded
    uint32_t elements = 0, lines = 0, params = 0;
    uint32_t spans = 0, line = 0, group = 0, groups = 0;  // lines per matrix, steps per line
    uint32_t matrix_rows, channels, head, bits, said;
    uint32_t span;  // tokens of a group
    uint32_t step_bytes, part_bytes;
    bool by_token;
    float scale = 0;  // of nvfp4

    KVTIER_DEVICE Plan(const Part& part, uint32_t width, uint32_t rows_, uint32_t channels_,
                       uint32_t head_, bool by_token_)
        : matrix_rows(rows_),
          channels(channels_),
          head(head_),
          said(part.bits),
          by_token(by_token_) {
        const codec::FixedForm form = codec::fixed_form(said);
        const uint32_t most = static_cast<uint32_t>(form.channels);
        bits = form.bits;
        span = static_cast<uint32_t>(form.tokens);
        step_bytes = static_cast<uint32_t>(form.step_bytes);
        part_bytes = static_cast<uint32_t>(form.part_bytes);
        const uint32_t raw_bytes = static_cast<uint32_t>(part.raw_bytes);
        if (matrix_rows == 0 || channels == 0 || head == 0 || channels > codec::kChannelsMost ||
            channels % head != 0 || uint64_t{matrix_rows} * channels * width > raw_bytes) {
            return;
        }
        const uint32_t matrix = matrix_rows * channels * width;
        if (raw_bytes % matrix != 0) return;
        elements = raw_bytes / width;
        groups = (head + most - 1) / most;  // per head
        group = (head + groups - 1) / groups;
        spans = (matrix_rows + span - 1) / span;
        line = by_token ? channels / head * groups : channels;
        lines = by_token ? elements / channels : raw_bytes / matrix * spans;
        params = part_bytes + lines * line * step_bytes;
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
        return {lines == 1 ? 0 : row / matrix_rows * spans + row % matrix_rows / span, channel};
    }
    // True if eight elements whose first index is a multiple of eight have one line, and one step
    // or consecutive ones.
    KVTIER_DEVICE bool by_eight() const {
        return channels % 8 == 0 && (!by_token || (head % 8 == 0 && group % 8 == 0));
    }
    // The elements of a group: the first one, their number, and the distance between two of them.
    struct Members {
        uint32_t first, count, apart;
    };
    KVTIER_DEVICE Members members(uint32_t in_line, uint32_t step) const {
        if (by_token) {
            const uint32_t within = step % groups * group, left = head - within;
            return {in_line * channels + step / groups * head + within, left < group ? left : group,
                    1};
        }
        const uint32_t skipped = in_line % spans * span, left = matrix_rows - skipped;
        return {(in_line / spans * matrix_rows + skipped) * channels + step,
                left < span ? left : span, channels};
    }
    KVTIER_DEVICE bool small() const { return step_bytes == 1; }
    KVTIER_DEVICE float small_step(uint8_t byte) const {
        return said == codec::kNvfp4Bits ? codec::nvfp4_step(byte, scale) : codec::mxfp4_step(byte);
    }
    KVTIER_DEVICE uint8_t small_byte(float most) const {
        if (said != codec::kNvfp4Bits) return codec::mxfp4_byte(most);
        return codec::nvfp4_byte(most, codec::part_inverse_of(scale));
    }
    KVTIER_DEVICE uint64_t place(uint32_t in_line, uint32_t step) const {
        return uint64_t{in_line} * line * step_bytes + (small() ? step : 2 * step) + part_bytes;
    }
    KVTIER_DEVICE Steps steps(const uint8_t* from, const Owner& is) const {
        if (step_bytes == 0) return {0, 0};
        const uint8_t* const at = from + place(is.line, is.step);
        if (small()) return {0, small_step(*at)};
        if (bits == 8) {
            const float step = codec::float_of(get16(at) << 16);
            return {codec::base_of(step), step};
        }
        return {codec::float_of(get16(at) << 16), codec::float_of(get16(at + 2 * line) << 16)};
    }
    KVTIER_DEVICE bool steps_of(uint32_t largest, float least, float most, Steps& is) const {
        return said == codec::kFp8Bits ? codec::float_steps_of(largest, least, most, is)
                                       : codec::steps_of(bits, largest, least, most, is);
    }
    KVTIER_DEVICE uint32_t code_of(float value, const Steps& is) const {
        if (step_bytes == 0) return codec::e5m2_of(value);
        const float inverse = codec::inverse_of(is.step);
        if (small()) return codec::e2m1_of(value, inverse);
        if (said == codec::kFp8Bits) return codec::e4m3_of(value * inverse);
        return codec::code_of(value, is.base, inverse);
    }
    KVTIER_DEVICE float value_of(uint8_t code, const Steps& is) const {
        if (step_bytes == 0) return codec::float_of_e5m2(code);
        if (small()) return codec::float_of_e2m1(code) * is.step;
        if (said == codec::kFp8Bits) return codec::float_of_e4m3(code) * is.step;
        return codec::value_of(code, is.base, is.step);
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

// Eight codes from element i, which is a multiple of eight: a byte per code, with other codes' bits
// in it.
KVTIER_DEVICE uint64_t eight_codes(const Plan& plan, const uint8_t* codes, const uint8_t* end,
                                   uint32_t i) {
    const uint32_t packed = 8 * plan.bits, within = i % static_cast<uint32_t>(kUnit);
    const uint8_t* const at = codes + i / static_cast<uint32_t>(kUnit) * packed;
    return get64(at + (within & (packed - 1)), end) >> (within / 8 & ~(plan.bits - 1));
}

// The upper halves of eight floats, or eight times the same.
KVTIER_DEVICE void eight_halves(const uint8_t* from, const uint8_t* end, bool same,
                                float (&halves)[8]) {
    if (same) {
        const float half = codec::float_of(get16(from) << 16);
        KVTIER_UNROLLED
        for (float& one : halves) one = half;
        return;
    }
    KVTIER_UNROLLED
    for (uint32_t k = 0; k < 8; k += 4) {
        const uint64_t four = get64(from + 2 * k, end);
        const uint32_t low = static_cast<uint32_t>(four), high = static_cast<uint32_t>(four >> 32);
        halves[k] = codec::float_of(low << 16), halves[k + 1] = codec::float_of(low & 0xFFFF0000);
        halves[k + 2] = codec::float_of(high << 16);
        halves[k + 3] = codec::float_of(high & 0xFFFF0000);
    }
}

// Decodes eight codes from element i. `end`: of the encoded part.
KVTIER_DEVICE void eight_values(const Plan& plan, const uint8_t* params, const uint8_t* end,
                                uint64_t codes, uint32_t i, float (&values)[8]) {
    const uint32_t mask = (1u << plan.bits) - 1;
    const auto code = [&](uint32_t k) {
        return static_cast<uint8_t>(static_cast<uint32_t>(codes >> 8 * k) & mask);
    };
    if (plan.step_bytes == 0) {
        KVTIER_UNROLLED
        for (uint32_t k = 0; k < 8; k++) values[k] = codec::float_of_e5m2(code(k));
        return;
    }
    const Plan::Owner owner = plan.owner(i);
    const uint8_t* const at = params + plan.place(owner.line, owner.step);
    if (plan.small()) {
        const uint64_t steps = plan.by_token ? uint64_t{*at} * 0x0101010101010101 : get64(at, end);
        KVTIER_UNROLLED
        for (uint32_t k = 0; k < 8; k++) {
            const float step = plan.small_step(static_cast<uint8_t>(steps >> 8 * k));
            values[k] = codec::float_of_e2m1(code(k)) * step;
        }
        return;
    }
    float steps[8];
    eight_halves(plan.bits == 8 ? at : at + 2 * plan.line, end, plan.by_token, steps);
    if (plan.said == codec::kFp8Bits) {
        KVTIER_UNROLLED
        for (uint32_t k = 0; k < 8; k++) values[k] = codec::float_of_e4m3(code(k)) * steps[k];
    } else if (plan.bits == 8) {
        KVTIER_UNROLLED
        for (uint32_t k = 0; k < 8; k++)
            values[k] = codec::value_of(code(k), codec::base_of(steps[k]), steps[k]);
    } else {
        float bases[8];
        eight_halves(at, end, plan.by_token, bases);
        KVTIER_UNROLLED
        for (uint32_t k = 0; k < 8; k++) values[k] = codec::value_of(code(k), bases[k], steps[k]);
    }
}

template <Element kIs>
KVTIER_DEVICE bool decode(const Part& part, uint32_t unit) {
    using Bits = typename Value<kIs>::Bits;
    if (part.text_bytes < kQuantizedHeader) return false;
    const uint8_t* const from = at<const uint8_t>(part.text);
    Plan plan(part, kBytes<kIs>, get32(from + codec::kRowsAt), get32(from + codec::kChannelsAt),
              get32(from + codec::kHeadAt), from[codec::kByTokenAt] != 0);
    if (plan.size == 0 || plan.size != part.text_bytes || from[codec::kByTokenAt] > 1 ||
        from[3] != 0 || from[codec::kElementAt] != static_cast<uint8_t>(kIs) ||
        from[codec::kBitsAt] != part.bits) {
        return false;
    }
    const uint8_t* const params = from + kQuantizedHeader;
    if (plan.part_bytes != 0) {
        plan.scale = codec::float_of(get32(params));
        if (!codec::part_scale_fits(Value<kIs>::kLargest, plan.scale)) return false;
    }
    uint8_t* const out = at<uint8_t>(part.raw);
    const uint32_t first = unit * kUnitElements;
    if (first >= plan.elements) return true;
    if (plan.by_eight() && part.raw % 16 == 0) {
        const uint32_t last =
            plan.elements - first < kUnitElements ? plan.elements : first + kUnitElements;
        const uint8_t* const end = from + part.text_bytes;
        constexpr uint32_t kStep = 8 * kWarp;
        each([&](uint32_t lane) {
            const auto codes = [&](uint32_t i) {
                return i < last ? eight_codes(plan, params + plan.params, end, i) : 0;
            };
            uint32_t i = first + 8 * lane;
            // Reads are in progress while values are computed.
            uint64_t now = codes(i), next = codes(i + kStep);
            for (; i < last; i += kStep) {
                const uint64_t later = codes(i + 2 * kStep);
                float values[8];
                eight_values(plan, params, end, now, i, values);
                Bits eight[8];
                KVTIER_UNROLLED
                for (uint32_t k = 0; k < 8; k++) eight[k] = Value<kIs>::narrowed(values[k]);
                store_eight(out + uint64_t{i} * kBytes<kIs>, eight);
                now = next, next = later;
            }
        });
        return true;
    }
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

// The magnitude of an element, as an integer of the same order.
template <Element kIs>
KVTIER_DEVICE uint32_t magnitude(const uint8_t* in, uint64_t i) {
    const uint32_t bits = load<typename Value<kIs>::Bits>(in + i * kBytes<kIs>);
    return bits & ((1u << (8 * kBytes<kIs> - 1)) - 1);
}
template <Element kIs>
KVTIER_DEVICE float widened(uint32_t magnitude) {
    return Value<kIs>::widened(static_cast<typename Value<kIs>::Bits>(magnitude));
}
KVTIER_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }

// Writes the largest magnitudes of this unit's groups to the scratch, and the largest one of them.
// A lane computes that of a group. False if a value may not be finite after decoding.
template <Element kIs>
KVTIER_DEVICE bool measure_small(const Part& part, const Plan& plan, uint32_t unit) {
    using Bits = typename Value<kIs>::Bits;
    const uint8_t* const in = at<const uint8_t>(part.raw);
    uint8_t* const sizes = at<uint8_t>(part.scratch) + uint64_t{part.units} * 4;
    const uint32_t all = plan.lines * plan.line;
    const uint32_t found = joined<uint32_t>(
        [&](uint32_t lane) {
            uint32_t greatest = 0;
            for (uint64_t i = uint64_t{unit} * kWarp + lane; i < all;
                 i += uint64_t{part.units} * kWarp) {
                const auto number = static_cast<uint32_t>(i);
                const auto is = plan.members(number / plan.line, number % plan.line);
                uint32_t most = 0;
                for (uint32_t k = 0; k < is.count; k++) {
                    most = larger(most, magnitude<kIs>(in, is.first + uint64_t{k} * is.apart));
                }
                store<Bits>(sizes + i * kBytes<kIs>, static_cast<Bits>(most));
                greatest = larger(greatest, most);
            }
            return greatest;
        },
        larger);
    each([&](uint32_t lane) {
        if (lane == 0) store<uint32_t>(at<uint8_t>(part.scratch) + uint64_t{unit} * 4, found);
    });
    return codec::small_fits(plan.said, Value<kIs>::kLargest, widened<kIs>(found));
}

// False if an element would not be finite as e5m2.
template <Element kIs>
KVTIER_DEVICE bool measure_halves(const Part& part, const Plan& plan, uint32_t unit) {
    const uint8_t* const in = at<const uint8_t>(part.raw);
    const uint32_t first = unit * kUnitElements;
    return ballot([&](uint32_t lane) {
               for (uint32_t i = first + lane; i < first + kUnitElements && i < plan.elements;
                    i += kWarp) {
                   const float size = widened<kIs>(magnitude<kIs>(in, i));
                   if (!(size < codec::float_of(codec::kE5m2End))) return true;
               }
               return false;
           }) == 0;
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
    if (plan.step_bytes < 2) {
        const bool fits = of_floats(part, [&](auto is) {
            return plan.small() ? measure_small<KVTIER_IS>(part, plan, unit)
                                : measure_halves<KVTIER_IS>(part, plan, unit);
        });
        each([&](uint32_t lane) {
            if (lane == 0) measured = {0, 0, unit == 0 ? plan.size : 0};
        });
        return fits;
    }
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
                const auto members = plan.members(line, step);
                group_ranges<KVTIER_IS>(in, members.first, members.count, ranges);
            } else {
                const auto members = plan.members(line, 0);
                channel_ranges<KVTIER_IS>(in, plan, members.first / plan.channels, members.count,
                                          step, ranges);
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

// The byte of a group's step, from its largest magnitude in the scratch.
template <Element kIs>
KVTIER_DEVICE uint8_t small_byte(const Part& part, const Plan& plan, const Plan::Owner& is) {
    const uint8_t* const sizes = at<const uint8_t>(part.scratch) + uint64_t{part.units} * 4;
    const uint64_t number = uint64_t{is.line} * plan.line + is.step;
    const auto most = load<typename Value<kIs>::Bits>(sizes + number * kBytes<kIs>);
    return plan.small_byte(Value<kIs>::widened(most));
}

// Computes the scale of the part, and writes it and this unit's share of the steps.
template <Element kIs>
KVTIER_DEVICE void place_steps(const Part& part, Plan& plan, uint32_t unit, uint8_t* params) {
    const uint8_t* const sizes = at<const uint8_t>(part.scratch);
    const uint32_t most = joined<uint32_t>(
        [&](uint32_t lane) {
            uint32_t found = 0;
            for (uint32_t i = lane; i < part.units; i += kWarp) {
                found = larger(found, load<uint32_t>(sizes + uint64_t{i} * 4));
            }
            return found;
        },
        larger);
    plan.scale = codec::part_scale_of(widened<kIs>(most));
    const uint32_t all = plan.lines * plan.line;
    for (uint64_t first = uint64_t{unit} * kWarp; first < all;
         first += uint64_t{part.units} * kWarp) {
        each([&](uint32_t lane) {
            const auto number = static_cast<uint32_t>(first) + lane;
            if (number >= all) return;
            const Plan::Owner is = {number / plan.line, number % plan.line};
            params[plan.place(is.line, is.step)] = small_byte<kIs>(part, plan, is);
        });
    }
    each([&](uint32_t lane) {
        if (lane == 0 && unit == 0 && plan.part_bytes != 0) {
            put32(params, codec::bits_of(plan.scale));
        }
    });
}

template <Element kIs>
KVTIER_DEVICE void place(const Part& part, uint32_t unit, uint8_t* out) {
    Plan plan(part, kBytes<kIs>, part.rows, part.channels, part.head, part.by_token != 0);
    const uint8_t* const in = at<const uint8_t>(part.raw);
    const uint8_t* const params = at<const uint8_t>(part.scratch);
    if (plan.small()) {
        place_steps<kIs>(part, plan, unit, out + kQuantizedHeader);
    } else {
        copy_share(out + kQuantizedHeader, params, plan.params, unit, part.units);
    }
    const auto code = [&](uint32_t i) -> uint32_t {
        if (i >= plan.elements) return 0;
        const auto owner = plan.owner(i);
        const Steps steps = plan.small()
                                ? Steps{0, plan.small_step(small_byte<kIs>(part, plan, owner))}
                                : plan.steps(params, owner);
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
