// ecsq and cachegen on a device, bit for bit as in docs/formats.md. A unit is a stream of a part.
// Decoding has two passes: the first writes numbers to the positions of their values, the second
// converts them to values, because a rotated pair may be in two streams. The encoder's scratch: the
// anchors of cachegen, three bytes each, then the memory of a StreamWriter for each stream.

#include "codec/calibrated.h"
#include "lanes.h"
#include "parts.h"
#include "streams.h"

namespace kvtier::cuda::calibrated {

// The content of a profile about a part.
struct ProfilePart {
    uint64_t means, exponents, anchors, turns;  // addresses of arrays, per channel; turns per pair
    uint64_t cosines, sines;
    uint32_t heads, dim, exact, group, level, symbols;
    uint32_t pairs, interleaved;  // the number of rotated pairs
    uint32_t anchored, reserved;  // relative to anchors (cachegen) or to means
    uint8_t frequencies[codec::kSymbolsMost];
};
static_assert(sizeof(ProfilePart) == 120);

namespace {

using codec::kAnchorEscape;
using codec::kCalibratedHeader;
using codec::kStreamSymbols;
using codec::Value;

constexpr uint32_t kOfStream = static_cast<uint32_t>(kStreamSymbols);
constexpr uint32_t kWarp = static_cast<uint32_t>(kLanes);
using Writer = StreamWriter<uint16_t>;

// The sizes of a part, if it consists of its channels.
struct Plan {
    bool is = false;
    uint32_t coded, channels, width;
    uint32_t tokens = 0, groups = 0, symbols = 0, streams = 0, anchors = 0, exact = 0;
    uint64_t token_bytes = 0, head_bytes = 0;
    uint64_t size = 0;  // of everything except words and escapes

    KVTIER_DEVICE Plan(const Part& part, const ProfilePart& known, uint32_t width_)
        : coded(known.dim - known.exact), channels(known.heads * coded), width(width_) {
        const uint32_t raw_bytes = static_cast<uint32_t>(part.raw_bytes);
        const uint32_t token = known.heads * known.dim * width;
        if (raw_bytes == 0 || raw_bytes % token != 0) return;
        tokens = raw_bytes / token;
        head_bytes = uint64_t{known.dim} * width * (part.heads_first ? tokens : 1);
        token_bytes = part.heads_first ? known.dim * width : token;
        groups = known.anchored ? (tokens + known.group - 1) / known.group : 0;
        symbols = (tokens - groups) * channels;
        streams = (symbols + kOfStream - 1) / kOfStream;
        anchors = groups * channels;
        exact = tokens * known.heads * known.exact * width;
        size = kCalibratedHeader + streams * (kStreamEntry + kStatesBytes) + anchors + exact;
        is = streams <= codec::kStreamsMost;
    }

    KVTIER_DEVICE uint32_t count(uint32_t stream) const {
        const uint32_t first = stream * kOfStream;
        if (first >= symbols) return 0;
        return symbols - first < kOfStream ? symbols - first : kOfStream;
    }
    // The position of the value of a token's channel.
    KVTIER_DEVICE uint64_t place(uint32_t token, uint32_t channel) const {
        return token * token_bytes + channel / coded * head_bytes + channel % coded * width;
    }
    // The token of a symbol, not counting anchors.
    KVTIER_DEVICE uint32_t token_of(uint32_t symbol, uint32_t group) const {
        const uint32_t token = symbol / channels;
        return groups == 0 ? token : token / (group - 1) * group + 1 + token % (group - 1);
    }
};

template <Element kIs>
KVTIER_DEVICE float value(const uint8_t* from) {
    return Value<kIs>::widened(load<typename Value<kIs>::Bits>(from));
}
template <Element kIs>
KVTIER_DEVICE void put_value(uint8_t* to, float value) {
    store(to, codec::held_in<kIs>(value));
}
// A number stored in the place of its value.
template <Element kIs>
KVTIER_DEVICE void put_number(uint8_t* to, int32_t number) {
    store(to, static_cast<typename Value<kIs>::Bits>(number));
}
template <Element kIs>
KVTIER_DEVICE int16_t number(const uint8_t* from) {
    return static_cast<int16_t>(load<typename Value<kIs>::Bits>(from));
}

// The two dims of a head that are rotated together.
struct Turn {
    uint32_t low, high;
};
KVTIER_DEVICE Turn turn(const ProfilePart& known, uint32_t pair) {
    if (known.interleaved) return {2 * pair, 2 * pair + 1};
    return {pair, known.pairs + pair};
}
KVTIER_DEVICE codec::Angle angle(const ProfilePart& known, uint64_t position, uint32_t pair) {
    return codec::angle_of(position * at<const uint64_t>(known.turns)[pair],
                           at<const float>(known.cosines), at<const float>(known.sines));
}

KVTIER_DEVICE float step(uint64_t exponents, uint32_t channel) {
    return codec::step_at(at<const uint8_t>(exponents)[channel]);
}
KVTIER_DEVICE float inverse(uint64_t exponents, uint32_t channel) {
    return codec::inverse_at(at<const uint8_t>(exponents)[channel]);
}
KVTIER_DEVICE float mean(const ProfilePart& known, uint32_t channel) {
    return known.anchored ? 0.0F : at<const float>(known.means)[channel];
}

// --- decoding ------------------------------------------------------------------------------------

// Decodes the numbers of anchors to where their values go; false if the escapes' number is wrong.
template <Element kIs>
KVTIER_DEVICE bool take_anchors(const Plan& plan, uint32_t group, const uint8_t* from,
                                uint32_t escaped, uint8_t* out) {
    const uint8_t* const escapes = from + plan.anchors;
    uint32_t used = 0;
    for (uint32_t first = 0; first < plan.anchors; first += kWarp) {
        Each<int32_t> found;
        const uint32_t far = ballot([&](uint32_t lane) {
            const bool is = first + lane < plan.anchors;
            found[lane] = is ? static_cast<int8_t>(from[first + lane]) : 0;
            return found[lane] == kAnchorEscape;
        });
        if (bits_in(far) > escaped - used) return false;
        each([&](uint32_t lane) {
            const uint32_t i = first + lane;
            if (i >= plan.anchors) return;
            if (far >> lane & 1) {
                found[lane] =
                    static_cast<int16_t>(get16(escapes + 2 * uint64_t{used + before(far, lane)}));
            }
            put_number<kIs>(out + plan.place(i / plan.channels * group, i % plan.channels),
                            found[lane]);
        });
        used += bits_in(far);
    }
    return used == escaped;
}

template <Element kIs>
KVTIER_DEVICE bool numbers(const Part& part, const ProfilePart& known, uint32_t unit,
                           DecodeSlots& slots) {
    const Plan plan(part, known, kBytes<kIs>);
    const uint8_t* const from = at<const uint8_t>(part.text);
    if (!plan.is || part.text_bytes < plan.size ||
        from[codec::kElementAt] != static_cast<uint8_t>(kIs) ||
        from[codec::kLevelAt] != known.level || get16(from + codec::kStreamsAt) != plan.streams) {
        return false;
    }
    uint64_t left = part.text_bytes - plan.size;
    const uint64_t escaped = plan.groups != 0 ? get32(from + codec::kLastAt) : 0;
    if (escaped > left / 2) return false;
    left -= 2 * escaped;
    StreamPosition lies;
    if (!find_stream(from + kCalibratedHeader, plan.streams, unit, 2, left, lies)) return false;
    const uint8_t* const anchors = from + kCalibratedHeader + plan.streams * kStreamEntry;
    uint8_t* const out = at<uint8_t>(part.raw);
    if (unit == 0 && plan.groups != 0 &&
        !take_anchors<kIs>(plan, known.group, anchors, static_cast<uint32_t>(escaped), out)) {
        return false;
    }
    const uint32_t count = plan.count(unit);
    if (count == 0) return true;
    const uint32_t rows = (count + kWarp - 1) / kWarp;
    if (lies.words > codec::words_most(rows * kWarp)) return false;
    const uint8_t* const stream =
        anchors + plan.anchors + 2 * escaped + unit * kStatesBytes + lies.before;
    const uint8_t* const escapes = stream + kStatesBytes + 2 * uint64_t{lies.words};
    const int32_t reach = static_cast<int32_t>(known.symbols / 2) - 1;
    const uint32_t last = known.symbols - 1;
    slots.fill(known.frequencies);
    StreamReader reader(slots, stream, lies.words);
    if (!reader.begins()) return false;
    uint32_t used = 0;
    for (uint32_t row = 0; row < rows; row++) {
        Each<uint32_t> symbol;
        reader.row(symbol);
        const uint32_t odd = ballot([&](uint32_t lane) {
            return row * kWarp + lane >= count && symbol[lane] != static_cast<uint32_t>(reach);
        });
        const uint32_t far = ballot(
            [&](uint32_t lane) { return row * kWarp + lane < count && symbol[lane] == last; });
        if (odd != 0 || bits_in(far) > lies.escapes - used) return false;
        each([&](uint32_t lane) {
            if (row * kWarp + lane >= count) return;
            const uint32_t i = unit * kOfStream + row * kWarp + lane;
            int32_t found = static_cast<int32_t>(symbol[lane]) - reach;
            if (far >> lane & 1) {
                found =
                    static_cast<int16_t>(get16(escapes + 2 * uint64_t{used + before(far, lane)}));
            }
            put_number<kIs>(out + plan.place(plan.token_of(i, known.group), i % plan.channels),
                            found);
        });
        used += bits_in(far);
    }
    return reader.ends() && used == lies.escapes;
}

// The second pass. A lane processes a rotated pair, or another dim, for a run of tokens: those of
// one anchor, or a fixed number.
template <Element kIs>
KVTIER_DEVICE void values(const Part& part, const ProfilePart& known, uint32_t unit) {
    constexpr uint32_t kRun = 16;
    const Plan plan(part, known, kBytes<kIs>);
    uint8_t* const raw = at<uint8_t>(part.raw);
    const uint8_t* const from = at<const uint8_t>(part.text);
    const uint32_t run = known.anchored ? known.group : kRun;
    const uint32_t of_head = plan.coded - known.pairs, of_token = known.heads * of_head;
    const uint32_t all = (plan.tokens + run - 1) / run * of_token;
    const uint64_t position = known.anchored ? 0 : get32(from + codec::kLastAt);
    for (uint32_t first = unit * kWarp; first < all; first += part.units * kWarp) {
        each([&](uint32_t lane) {
            const uint32_t i = first + lane;
            if (i >= all) return;
            const uint32_t token = i / of_token * run, k = i % of_token % of_head;
            const uint32_t left = plan.tokens - token, count = left < run ? left : run;
            const uint32_t head = i % of_token / of_head, channel = head * plan.coded;
            uint8_t* const out = raw + token * plan.token_bytes + head * plan.head_bytes;
            if (k >= known.pairs) {
                const uint32_t dim = known.pairs + k;
                const float one = step(known.exponents, channel + dim);
                float expected = mean(known, channel + dim);
                uint8_t* to = out + dim * plan.width;
                for (uint32_t t = 0; t < count; t++, to += plan.token_bytes) {
                    if (known.anchored && t == 0) {
                        const float base = static_cast<float>(number<kIs>(to)) *
                                           step(known.anchors, channel + dim);
                        put_value<kIs>(
                            to, codec::value_at(number<kIs>(to), step(known.anchors, channel + dim),
                                                expected));
                        expected = base;
                    } else {
                        put_value<kIs>(to, codec::value_at(number<kIs>(to), one, expected));
                    }
                }
                return;
            }
            const Turn dims = turn(known, k);
            const float low_step = step(known.exponents, channel + dims.low);
            const float high_step = step(known.exponents, channel + dims.high);
            const float low_mean = mean(known, channel + dims.low);
            const float high_mean = mean(known, channel + dims.high);
            for (uint32_t t = 0; t < count; t++) {
                uint8_t* const low = out + t * plan.token_bytes + dims.low * plan.width;
                uint8_t* const high = out + t * plan.token_bytes + dims.high * plan.width;
                const codec::Angle by = angle(known, position + token + t, k);
                const codec::Pair pair = codec::turned_forward(
                    codec::value_at(number<kIs>(low), low_step, low_mean),
                    codec::value_at(number<kIs>(high), high_step, high_mean), by.cos, by.sin);
                put_value<kIs>(low, pair.low);
                put_value<kIs>(high, pair.high);
            }
        });
    }
}

// Copies this unit's share of the exact channels of each head: into the encoded part, or back.
KVTIER_DEVICE void copy_exact(const Part& part, const Plan& plan, const ProfilePart& known,
                              uint32_t unit, uint8_t* text, bool back) {
    const uint32_t kept = known.exact * plan.width;
    const Share share(plan.exact, unit, part.units, 128);
    uint8_t* const raw = at<uint8_t>(part.raw);
    for (uint64_t first = share.first; first < share.end; first += kWarp) {
        each([&](uint32_t lane) {
            const uint32_t i = static_cast<uint32_t>(first) + lane;
            if (i >= share.end) return;
            const uint32_t head = i / kept;
            uint8_t* const at = raw + head / known.heads * plan.token_bytes +
                                head % known.heads * plan.head_bytes + plan.coded * plan.width +
                                i % kept;
            if (back) {
                *at = text[i];
            } else {
                text[i] = *at;
            }
        });
    }
}

// --- encoding ------------------------------------------------------------------------------------

KVTIER_DEVICE uint64_t anchors_room(const Plan& plan) {
    return (uint64_t{plan.anchors} * 3 + 7) / 8 * 8;
}
KVTIER_DEVICE uint8_t* room_of(const Part& part, const Plan& plan, uint32_t unit) {
    return at<uint8_t>(part.scratch) + anchors_room(plan) + unit * Writer::kRoom;
}

// A number, and whether it can be encoded.
struct EncodedNumber {
    int16_t number;
    bool near;
};

template <Element kIs>
KVTIER_DEVICE EncodedNumber told_anchor(const Part& part, const Plan& plan,
                                        const ProfilePart& known, uint32_t token,
                                        uint32_t channel) {
    const float found = value<kIs>(at<const uint8_t>(part.raw) + plan.place(token, channel));
    const float steps = codec::steps_away(found, 0.0F, inverse(known.anchors, channel));
    return {codec::nearest_of(steps), codec::near_enough(steps) && codec::is_number<kIs>(found)};
}

template <Element kIs>
KVTIER_DEVICE EncodedNumber told(const Part& part, const Plan& plan, const ProfilePart& known,
                                 uint32_t token, uint32_t channel) {
    const uint8_t* const here = at<const uint8_t>(part.raw) + plan.place(token, channel);
    const uint32_t dim = channel % plan.coded;
    float found = value<kIs>(here), expected = mean(known, channel);
    bool near = codec::is_number<kIs>(found);
    if (known.anchored) {
        const uint32_t anchor = token / known.group * known.group;
        expected = static_cast<float>(told_anchor<kIs>(part, plan, known, anchor, channel).number) *
                   step(known.anchors, channel);
    } else if (dim < 2 * known.pairs) {
        const bool high = known.interleaved ? dim % 2 != 0 : dim >= known.pairs;
        const uint32_t pair = known.interleaved ? dim / 2 : (high ? dim - known.pairs : dim);
        const uint32_t apart = (known.interleaved ? 1 : known.pairs) * plan.width;
        const float other = value<kIs>(high ? here - apart : here + apart);
        near &= codec::is_number<kIs>(other);
        const codec::Angle by = angle(known, uint64_t{part.position} + token, pair);
        const codec::Pair back =
            codec::turned_back(high ? other : found, high ? found : other, by.cos, by.sin);
        found = high ? back.high : back.low;
    }
    const float steps = codec::steps_away(found, expected, inverse(known.exponents, channel));
    return {codec::nearest_of(steps), near && codec::near_enough(steps)};
}

// Encodes the anchors; returns the number of escapes, and sets a flag if one cannot be encoded.
template <Element kIs>
KVTIER_DEVICE uint32_t put_anchors(const Part& part, const Plan& plan, const ProfilePart& known,
                                   bool& near) {
    uint8_t* const to = at<uint8_t>(part.scratch);
    uint32_t escaped = 0;
    for (uint32_t first = 0; first < plan.anchors; first += kWarp) {
        Each<int32_t> found;
        const uint32_t lost = ballot([&](uint32_t lane) {
            const uint32_t i = first + lane;
            found[lane] = 0;
            if (i >= plan.anchors) return false;
            const EncodedNumber one = told_anchor<kIs>(
                part, plan, known, i / plan.channels * known.group, i % plan.channels);
            found[lane] = one.number;
            return !one.near;
        });
        near &= lost == 0;
        const uint32_t far =
            ballot([&](uint32_t lane) { return found[lane] < -127 || found[lane] > 127; });
        each([&](uint32_t lane) {
            if (first + lane >= plan.anchors) return;
            const bool is = far >> lane & 1;
            to[first + lane] = static_cast<uint8_t>(is ? kAnchorEscape : found[lane]);
            if (is) {
                put16(to + plan.anchors + 2 * uint64_t{escaped + before(far, lane)},
                      static_cast<uint32_t>(found[lane]));
            }
        });
        escaped += bits_in(far);
    }
    return escaped;
}

template <Element kIs>
KVTIER_DEVICE bool measure(const Part& part, const ProfilePart& known, uint32_t unit,
                           EncodeSymbols& symbols, Measure& measured) {
    const Plan plan(part, known, kBytes<kIs>);
    if (!plan.is || plan.size >= part.raw_bytes) return false;
    bool near = true;
    uint64_t besides = 0;
    if (unit == 0) {
        besides = plan.size + 2 * uint64_t{put_anchors<kIs>(part, plan, known, near)};
    }
    const int32_t reach = static_cast<int32_t>(known.symbols / 2) - 1;
    const uint32_t last = known.symbols - 1, count = plan.count(unit);
    symbols.fill(known.frequencies);
    Writer writer(symbols, room_of(part, plan, unit));
    for (uint32_t row = (count + kWarp - 1) / kWarp; row-- > 0;) {
        Each<uint32_t> symbol;
        Each<uint16_t> escape;
        const uint32_t lost = ballot([&](uint32_t lane) {
            symbol[lane] = static_cast<uint32_t>(reach);
            escape[lane] = 0;
            if (row * kWarp + lane >= count) return false;
            const uint32_t i = unit * kOfStream + row * kWarp + lane;
            const EncodedNumber one =
                told<kIs>(part, plan, known, plan.token_of(i, known.group), i % plan.channels);
            const uint32_t found = static_cast<uint16_t>(one.number + reach);
            symbol[lane] = found < last ? found : last;
            escape[lane] = static_cast<uint16_t>(one.number);
            return !one.near;
        });
        near &= lost == 0;
        const uint32_t far = ballot([&](uint32_t lane) { return symbol[lane] == last; });
        writer.row(symbol, far, escape);
    }
    writer.finish(measured, besides);
    return near;
}

template <Element kIs>
KVTIER_DEVICE void place(const Part& part, const ProfilePart& known, uint32_t unit,
                         const Measure* measures, const Result& result, uint8_t* out) {
    const Plan plan(part, known, kBytes<kIs>);
    const uint64_t front =
        measures[0].bytes - plan.size - 2 * (uint64_t{measures[0].words} + measures[0].escapes);
    uint8_t* const anchors = out + kCalibratedHeader + plan.streams * kStreamEntry;
    copy_exact(part, plan, known, unit, out + result.bytes - plan.exact, false);
    if (unit < plan.streams) {
        Writer::place(
            room_of(part, plan, unit), measures[unit],
            anchors + plan.anchors + front + unit * kStatesBytes + bytes_before(measures, unit, 2));
        each([&](uint32_t lane) {
            if (lane != 0) return;
            uint8_t* const entry = out + kCalibratedHeader + unit * kStreamEntry;
            put32(entry, measures[unit].words);
            put32(entry + 4, measures[unit].escapes);
        });
    }
    if (unit != 0) return;
    copy(anchors, at<const uint8_t>(part.scratch), plan.anchors + front);
    each([&](uint32_t lane) {
        if (lane != 0) return;
        out[codec::kElementAt] = static_cast<uint8_t>(kIs);
        out[codec::kLevelAt] = static_cast<uint8_t>(known.level);
        put16(out + codec::kStreamsAt, plan.streams);
        put32(out + codec::kLastAt, known.anchored ? front / 2 : uint64_t{part.position});
    });
}

}  // namespace

KVTIER_KERNEL(kvtier_calibrated_numbers) {
    __shared__ DecodeSlots of_warps[kWarps];
    DecodeSlots& slots = of_warps[warp() % kWarps];
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        if (part.kept) return take_kept(part, unit);
        return part.known != 0 && of_floats(part, [&](auto is) {
                   return numbers<KVTIER_IS>(part, *at<const ProfilePart>(part.known), unit, slots);
               });
    });
}

KVTIER_KERNEL(kvtier_calibrated_values) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        if (part.kept || is_bad(result)) return true;
        return of_floats(part, [&](auto is) {
            const ProfilePart& known = *at<const ProfilePart>(part.known);
            const Plan plan(part, known, kBytes<KVTIER_IS>);
            values<KVTIER_IS>(part, known, unit);
            copy_exact(part, plan, known, unit,
                       at<uint8_t>(part.text) + part.text_bytes - plan.exact, true);
            return true;
        });
    });
}

KVTIER_KERNEL(kvtier_calibrated_measure) {
    __shared__ EncodeSymbols of_warps[kWarps];
    EncodeSymbols& symbols = of_warps[warp() % kWarps];
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result&) {
        if (part.kept) return true;
        return part.known != 0 && of_floats(part, [&](auto is) {
                   return measure<KVTIER_IS>(part, *at<const ProfilePart>(part.known), unit,
                                             symbols, measures[part.unit + unit]);
               });
    });
}

KVTIER_KERNEL(kvtier_calibrated_place) {
    of_units(parts, owners, units, results, [&](const Part& part, uint32_t unit, Result& result) {
        uint8_t* const out = place_of(part, unit, result);
        return out == nullptr || of_floats(part, [&](auto is) {
                   place<KVTIER_IS>(part, *at<const ProfilePart>(part.known), unit,
                                    measures + part.unit, result, out);
                   return true;
               });
    });
}

}  // namespace kvtier::cuda::calibrated
