// Codecs with a fixed rate: one source for all of their widths, element types and processors.
#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/codec.h"
#include "codec/parts.h"

#if KVTIER_X86
#include <immintrin.h>
#endif
#include "codec/quantized.h"

namespace kvtier::codec {
namespace {

// --- kernels -------------------------------------------------------------------------------------

// Plain loops, vectorized for each level. No result depends on the order of operations.

template <Element kIs>
KVTIER_LOOP typename Value<kIs>::Order ordered(const uint8_t* in) {
    typename Value<kIs>::Order bits;
    std::memcpy(&bits, in, sizeof bits);
    return turned(bits);
}
template <Element kIs>
KVTIER_LOOP float unordered(typename Value<kIs>::Order order) {
    return Value<kIs>::widened(static_cast<typename Value<kIs>::Bits>(turned(order)));
}
template <Element kIs>
KVTIER_LOOP float loaded(const uint8_t* in) {
    typename Value<kIs>::Bits bits;
    std::memcpy(&bits, in, sizeof bits);
    return Value<kIs>::widened(bits);
}

template <bool kFloat>
KVTIER_LOOP uint8_t coded(float value, float base, float inverse) {
    return kFloat ? e4m3_of(value * inverse) : code_of(value, base, inverse);
}
template <bool kFloat>
KVTIER_LOOP float valued(uint8_t code, float base, float step) {
    return kFloat ? float_of_e4m3(code) * step : value_of(code, base, step);
}

// The minimum and maximum of each channel.
template <Element kIs>
KVTIER_LOOP void channel_ranges(const uint8_t* __restrict in, size_t rows, size_t channels,
                                float* __restrict least, float* __restrict most) {
    using Order = typename Value<kIs>::Order;
    constexpr size_t kWide = 64;
    for (size_t first = 0; first < channels; first += kWide) {
        const size_t count = std::min(kWide, channels - first);
        Order low[kWide], high[kWide];
        const uint8_t* row = in + first * kBytes<kIs>;
        for (size_t i = 0; i < count; i++) low[i] = high[i] = ordered<kIs>(row + i * sizeof(Order));
        for (size_t i = count; i < kWide; i++) low[i] = high[i] = 0;
        for (size_t r = 1; r < rows; r++) {
            row += channels * kBytes<kIs>;
            if (count == kWide) {
                for (size_t i = 0; i < kWide; i++) {
                    const Order one = ordered<kIs>(row + i * sizeof(Order));
                    low[i] = one < low[i] ? one : low[i];
                    high[i] = one > high[i] ? one : high[i];
                }
            } else {
                for (size_t i = 0; i < count; i++) {
                    const Order one = ordered<kIs>(row + i * sizeof(Order));
                    low[i] = one < low[i] ? one : low[i];
                    high[i] = one > high[i] ? one : high[i];
                }
            }
        }
        for (size_t i = 0; i < count; i++) {
            least[first + i] = unordered<kIs>(low[i]);
            most[first + i] = unordered<kIs>(high[i]);
        }
    }
}

// Calls `act` for each group of channels: its first element, and how many it has.
template <typename Act>
KVTIER_LOOP void of_groups(size_t elements, size_t head, Act act) {
    const size_t group = group_of(head);
    for (size_t at = 0; at < elements;) {
        for (size_t left = head; left != 0;) {
            const size_t count = std::min(group, left);
            // With a constant count, the compiler needs no loop for remaining elements.
            if (count == kGroupChannels) {
                act(at, kGroupChannels);
            } else {
                act(at, count);
            }
            left -= count, at += count;
        }
    }
}

// The minimum and maximum of each group of a token's channels.
template <Element kIs>
KVTIER_LOOP void group_range(const uint8_t* __restrict in, size_t count, float& least,
                             float& most) {
    using Order = typename Value<kIs>::Order;
    Order low = ordered<kIs>(in), high = low;
    for (size_t i = 0; i < count; i++) {
        const Order one = ordered<kIs>(in + i * sizeof(Order));
        low = one < low ? one : low;
        high = one > high ? one : high;
    }
    least = unordered<kIs>(low), most = unordered<kIs>(high);
}
template <Element kIs>
KVTIER_LOOP void group_ranges(const uint8_t* __restrict in, size_t rows, size_t channels,
                              size_t head, float* __restrict least, float* __restrict most) {
    of_groups(rows * channels, head, [&](size_t at, size_t count) __attribute__((always_inline)) {
        group_range<kIs>(in + at * kBytes<kIs>, count, *least++, *most++);
    });
}

template <Element kIs, bool kFloat>
KVTIER_LOOP void channel_codes(const uint8_t* __restrict in, size_t rows, size_t channels,
                               const float* __restrict base, const float* __restrict inverse,
                               uint8_t* __restrict codes) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < channels; i++) {
            codes[i] = coded<kFloat>(loaded<kIs>(in + i * kBytes<kIs>), base[i], inverse[i]);
        }
        in += channels * kBytes<kIs>, codes += channels;
    }
}

template <Element kIs, bool kFloat>
KVTIER_LOOP void group_codes(const uint8_t* __restrict in, size_t count, float base, float inverse,
                             uint8_t* __restrict codes) {
    for (size_t i = 0; i < count; i++) {
        codes[i] = coded<kFloat>(loaded<kIs>(in + i * kBytes<kIs>), base, inverse);
    }
}
template <Element kIs, bool kFloat>
KVTIER_LOOP void token_codes(const uint8_t* __restrict in, size_t rows, size_t channels,
                             size_t head, const float* __restrict base,
                             const float* __restrict inverse, uint8_t* __restrict codes) {
    of_groups(rows * channels, head, [&](size_t at, size_t count) __attribute__((always_inline)) {
        group_codes<kIs, kFloat>(in + at * kBytes<kIs>, count, *base++, *inverse++, codes + at);
    });
}

template <Element kIs, bool kFloat>
KVTIER_LOOP void channel_values(const uint8_t* __restrict codes, size_t rows, size_t channels,
                                const float* __restrict base, const float* __restrict step,
                                uint8_t* __restrict out) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < channels; i++) {
            const auto bits = Value<kIs>::narrowed(valued<kFloat>(codes[i], base[i], step[i]));
            std::memcpy(out + i * kBytes<kIs>, &bits, sizeof bits);
        }
        codes += channels, out += channels * kBytes<kIs>;
    }
}

template <Element kIs, bool kFloat>
KVTIER_LOOP void group_values(const uint8_t* __restrict codes, size_t count, float base, float step,
                              uint8_t* __restrict out) {
    for (size_t i = 0; i < count; i++) {
        const auto bits = Value<kIs>::narrowed(valued<kFloat>(codes[i], base, step));
        std::memcpy(out + i * kBytes<kIs>, &bits, sizeof bits);
    }
}
template <Element kIs, bool kFloat>
KVTIER_LOOP void token_values(const uint8_t* __restrict codes, size_t rows, size_t channels,
                              size_t head, const float* __restrict base,
                              const float* __restrict step, uint8_t* __restrict out) {
    of_groups(rows * channels, head, [&](size_t at, size_t count) __attribute__((always_inline)) {
        group_values<kIs, kFloat>(codes + at, count, *base++, *step++, out + at * kBytes<kIs>);
    });
}

// Codes with less than 8 bits: of the 64 codes of a unit, code i goes into byte i modulo the unit's
// bytes; those with the lowest i go into the lowest bits.
template <unsigned kBits>
KVTIER_LOOP void pack(const uint8_t* __restrict codes, size_t units, uint8_t* __restrict out) {
    constexpr size_t kPacked = kUnit * kBits / 8;
    for (size_t unit = 0; unit < units; unit++, codes += kUnit, out += kPacked) {
        for (size_t i = 0; i < kPacked; i++) {
            unsigned byte = 0;
            for (size_t k = 0; k < 8 / kBits; k++) {
                byte |= static_cast<unsigned>(codes[i + k * kPacked]) << (k * kBits);
            }
            out[i] = static_cast<uint8_t>(byte);
        }
    }
}

template <unsigned kBits>
KVTIER_LOOP void unpack(const uint8_t* __restrict in, size_t units, uint8_t* __restrict codes) {
    constexpr size_t kPacked = kUnit * kBits / 8;
    for (size_t unit = 0; unit < units; unit++, codes += kUnit, in += kPacked) {
        for (size_t k = 0; k < 8 / kBits; k++) {
            for (size_t i = 0; i < kPacked; i++) {
                codes[i + k * kPacked] =
                    static_cast<uint8_t>(in[i] >> (k * kBits) & ((1u << kBits) - 1));
            }
        }
    }
}

// Kernels for rows of whole tokens. There is one step per channel, or (by token) one for each group
// of each row. The last two kernels of codes and of values are those of fp8.
struct TypeKernels {
    void (*ranges[2])(const uint8_t* in, size_t rows, size_t channels, size_t head, float* least,
                      float* most);
    void (*codes[4])(const uint8_t* in, size_t rows, size_t channels, size_t head,
                     const float* base, const float* inverse, uint8_t* codes);
    void (*values[4])(const uint8_t* codes, size_t rows, size_t channels, size_t head,
                      const float* base, const float* step, uint8_t* out);
};
struct LevelKernels {
    TypeKernels types[kQuantizedTypes];
    void (*pack4)(const uint8_t* codes, size_t units, uint8_t* out);
    void (*pack2)(const uint8_t* codes, size_t units, uint8_t* out);
    void (*unpack4)(const uint8_t* in, size_t units, uint8_t* codes);
    void (*unpack2)(const uint8_t* in, size_t units, uint8_t* codes);
};

#define KVTIER_QUANTIZED(LEVEL, TARGET)                                                        \
    template <Element kIs, bool kByToken>                                                      \
    TARGET void ranges##LEVEL(const uint8_t* in, size_t rows, size_t channels, size_t head,    \
                              float* least, float* most) {                                     \
        if (kByToken) return group_ranges<kIs>(in, rows, channels, head, least, most);         \
        channel_ranges<kIs>(in, rows, channels, least, most);                                  \
    }                                                                                          \
    template <Element kIs, bool kByToken, bool kFloat>                                         \
    TARGET void codes##LEVEL(const uint8_t* in, size_t rows, size_t channels, size_t head,     \
                             const float* base, const float* inverse, uint8_t* codes) {        \
        if (kByToken)                                                                          \
            return token_codes<kIs, kFloat>(in, rows, channels, head, base, inverse, codes);   \
        channel_codes<kIs, kFloat>(in, rows, channels, base, inverse, codes);                  \
    }                                                                                          \
    template <Element kIs, bool kByToken, bool kFloat>                                         \
    TARGET void values##LEVEL(const uint8_t* codes, size_t rows, size_t channels, size_t head, \
                              const float* base, const float* step, uint8_t* out) {            \
        if (kByToken)                                                                          \
            return token_values<kIs, kFloat>(codes, rows, channels, head, base, step, out);    \
        channel_values<kIs, kFloat>(codes, rows, channels, base, step, out);                   \
    }                                                                                          \
    template <unsigned kBits>                                                                  \
    TARGET void pack##LEVEL(const uint8_t* codes, size_t units, uint8_t* out) {                \
        pack<kBits>(codes, units, out);                                                        \
    }                                                                                          \
    template <unsigned kBits>                                                                  \
    TARGET void unpack##LEVEL(const uint8_t* in, size_t units, uint8_t* codes) {               \
        unpack<kBits>(in, units, codes);                                                       \
    }                                                                                          \
    template <Element kIs>                                                                     \
    constexpr TypeKernels kType##LEVEL = {                                                     \
        {ranges##LEVEL<kIs, false>, ranges##LEVEL<kIs, true>},                                 \
        {codes##LEVEL<kIs, false, false>, codes##LEVEL<kIs, true, false>,                      \
         codes##LEVEL<kIs, false, true>, codes##LEVEL<kIs, true, true>},                       \
        {values##LEVEL<kIs, false, false>, values##LEVEL<kIs, true, false>,                    \
         values##LEVEL<kIs, false, true>, values##LEVEL<kIs, true, true>}};                    \
    constexpr LevelKernels k##LEVEL = {                                                        \
        {kType##LEVEL<Element::kBf16>, kType##LEVEL<Element::kFp16>,                           \
         kType##LEVEL<Element::kFp32>},                                                        \
        pack##LEVEL<4>,                                                                        \
        pack##LEVEL<2>,                                                                        \
        unpack##LEVEL<4>,                                                                      \
        unpack##LEVEL<2>};

KVTIER_QUANTIZED(Plain, )
#if KVTIER_X86
#define KVTIER_LINES                                                               \
    __attribute__((                                                                \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,prefer-vector-width=" \
               "512")))
KVTIER_QUANTIZED(Half, KVTIER_AVX2)
KVTIER_QUANTIZED(Whole, KVTIER_LINES)
#endif

#if KVTIER_X86
// Intrinsics for bf16: q8 decodes at 0.85 of the speed of memcpy with them, and at 0.71 with the
// plain loop and a copy of its lines that bypasses the caches.
KVTIER_LINES KVTIER_LOOP __m512i values16(const uint8_t* codes, __m512 base, __m512 step) {
    const __m512i wide =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m512i bits =
        _mm512_castps_si512(_mm512_add_ps(base, _mm512_mul_ps(_mm512_cvtepi32_ps(wide), step)));
    // Rounds to the nearest, ties to even: 0x8000 if the last remaining bit is set.
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i down = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    return _mm512_mask_add_epi32(down, odd, bits, _mm512_set1_epi32(0x8000));
}

// The upper halves of 32 floats, as one line.
template <bool kStreaming>
KVTIER_LINES KVTIER_LOOP void put_uppers(uint8_t* out, __m512i low, __m512i high) {
    const __m512i uppers =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i both = _mm512_permutex2var_epi16(low, uppers, high);
    if constexpr (kStreaming) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), both);
    } else {
        _mm512_storeu_si512(out, both);
    }
}

template <bool kByToken, bool kStreaming>
KVTIER_LINES void values_bf16(const uint8_t* codes, size_t rows, size_t channels, const float* base,
                              const float* step, uint8_t* out) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t at = 0; at < channels; at += kUnit, codes += kUnit, out += 2 * kUnit) {
            __m512i found[4];
            if (kByToken) {
                const __m512 b = _mm512_set1_ps(*base++), s = _mm512_set1_ps(*step++);
                for (size_t i = 0; i < 4; i++) found[i] = values16(codes + 16 * i, b, s);
            } else {
                for (size_t i = 0; i < 4; i++) {
                    found[i] = values16(codes + 16 * i, _mm512_loadu_ps(base + at + 16 * i),
                                        _mm512_loadu_ps(step + at + 16 * i));
                }
            }
            put_uppers<kStreaming>(out, found[0], found[1]);
            put_uppers<kStreaming>(out + kUnit, found[2], found[3]);
        }
    }
}
#endif

const LevelKernels& level() { return KVTIER_LEVELS(kPlain, kHalf, kWhole); }

// --- independent of the processor ----------------------------------------------------------------

unsigned bits_of(Codec codec) {
    if (codec == Codec::kQ8 || codec == Codec::kFp8) return 8;
    return codec == Codec::kQ4 ? 4 : 2;
}

uint16_t upper(float value) { return static_cast<uint16_t>(codec::bits_of(value) >> 16); }

// The sizes of a part, if it has the layout of the grid.
struct Plan {
    Plan(Codec codec, Element element, const Grid& is, size_t raw_bytes)
        : grid(is),
          bits(bits_of(codec)),
          floating(codec == Codec::kFp8),
          type(static_cast<size_t>(element)) {
        if (type >= kQuantizedTypes || grid.rows == 0 || grid.channels == 0 || grid.head == 0 ||
            grid.channels > kChannelsMost || grid.channels % grid.head != 0) {
            return;
        }
        width = element == Element::kFp32 ? 4 : 2;
        const size_t matrix = size_t{grid.rows} * grid.channels * width;
        if (raw_bytes == 0 || raw_bytes % matrix != 0) return;
        rows = raw_bytes / width / grid.channels;
        groups = grid.channels / grid.head * groups_of(grid.head);
        const size_t spans = (size_t{grid.rows} + kGroupTokens - 1) / kGroupTokens;
        const size_t steps =
            grid.by_token ? rows * groups : raw_bytes / matrix * spans * grid.channels;
        params = steps * (bits == 8 ? 2 : 4);
        codes = (rows * grid.channels + kUnit - 1) / kUnit * kUnit * bits / 8;
        size = kQuantizedHeader + params + codes;
    }

    // The number of rows from this one on that share their channels' steps, or have their own.
    size_t span(size_t row) const {
        if (grid.by_token) return std::min(tile(), rows - row);
        const size_t within = row % grid.rows;
        return std::min(kGroupTokens - within % kGroupTokens, grid.rows - within);
    }
    // The number of rows that are processed at a time.
    size_t tile() const { return std::max<size_t>(1, kTile / grid.channels); }
    // The kernels of a type: which of them to use.
    size_t kind() const { return (floating ? 2 : 0) + (grid.by_token ? 1 : 0); }
    uint8_t bits_byte() const { return static_cast<uint8_t>(bits + (floating ? kFloating : 0)); }
    size_t lines(size_t count) const { return grid.by_token ? count : 1; }
    size_t line() const { return grid.by_token ? groups : grid.channels; }

    static constexpr size_t kTile = 4096;  // elements, unless a row has more

    Grid grid;
    unsigned bits;
    bool floating;
    size_t type, width = 0;
    size_t rows = 0, groups = 0, params = 0, codes = 0;
    size_t size = 0;  // zero if the part cannot be encoded
};

// The buffers of a thread, because stacks are small.
struct Scratch {
    std::vector<float> low, high, base, step;
    std::vector<uint8_t> codes, packed, values;

    void fit(const Plan& plan) {
        const size_t steps = plan.grid.by_token ? plan.tile() * plan.groups : plan.grid.channels;
        const size_t elements = plan.tile() * plan.grid.channels;
        for (auto* numbers : {&low, &high, &base, &step}) numbers->resize(steps);
        // With space for the rest of the previous rows: less than a tile and less than a unit.
        codes.resize(elements + Plan::kTile + kUnit);
        packed.resize(elements + Plan::kTile + kUnit);
        values.resize(elements * plan.width);
    }
};

Scratch& scratch(const Plan& plan) {
    thread_local Scratch kept;
    kept.fit(plan);
    return kept;
}

// Prefetches the next input during the computation.
void fetch(const uint8_t* at, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Packs codes as they arrive, in whole units.
class Packer {
 public:
    Packer(const Plan& plan, bool streaming, Scratch& kept, uint8_t* out)
        : bits_(plan.bits), streaming_(streaming), kept_(kept), out_(out) {}

    uint8_t* room() { return kept_.codes.data() + held_; }
    void add(size_t count) {
        held_ += count;
        if (held_ >= Plan::kTile) put(held_ / kUnit);
    }
    void finish() {
        const size_t units = (held_ + kUnit - 1) / kUnit;
        std::memset(room(), 0, units * kUnit - held_);
        put(units);
    }

 private:
    void put(size_t units) {
        const LevelKernels& by = level();
        const uint8_t* from = kept_.packed.data();
        if (bits_ == 8) {
            from = kept_.codes.data();
        } else {
            (bits_ == 4 ? by.pack4 : by.pack2)(kept_.codes.data(), units, kept_.packed.data());
        }
        const size_t nbytes = units * kUnit * bits_ / 8;
        put_bytes(out_, from, nbytes, streaming_);
        out_ += nbytes;
        held_ -= std::min(held_, units * kUnit);
        std::memmove(kept_.codes.data(), kept_.codes.data() + units * kUnit, held_);
    }

    unsigned bits_;
    bool streaming_;
    Scratch& kept_;
    uint8_t* out_;
    size_t held_ = 0;
};

// Unpacks codes in any amounts.
class Unpacker {
 public:
    Unpacker(const Plan& plan, Scratch& kept, const uint8_t* in)
        : bits_(plan.bits), kept_(kept), in_(in) {}

    // The next `count` codes; valid until the next call.
    const uint8_t* take(size_t count) {
        if (bits_ == 8) {
            in_ += count;
            fetch(in_, count);
            return in_ - count;
        }
        uint8_t* const codes = kept_.codes.data();
        held_ -= taken_;
        std::memmove(codes, codes + taken_, held_);
        taken_ = count;
        if (held_ < count) {
            const LevelKernels& by = level();
            const size_t units = (count - held_ + kUnit - 1) / kUnit;
            (bits_ == 4 ? by.unpack4 : by.unpack2)(in_, units, codes + held_);
            in_ += units * kUnit * bits_ / 8;
            fetch(in_, units * kUnit * bits_ / 8);
            held_ += units * kUnit;
        }
        return codes;
    }

 private:
    unsigned bits_;
    Scratch& kept_;
    const uint8_t* in_;
    size_t held_ = 0, taken_ = 0;
};

// Writes the steps of these lines, fills the kernels' inputs; false if a group has no valid steps.
bool make_steps(const Plan& plan, size_t lines, Scratch& kept, uint8_t*& out) {
    const uint32_t largest[kQuantizedTypes] = {Value<Element::kBf16>::kLargest,
                                               Value<Element::kFp16>::kLargest,
                                               Value<Element::kFp32>::kLargest};
    const size_t count = plan.line();
    for (size_t line = 0, at = 0; line < lines; line++) {
        for (size_t i = 0; i < count; i++, at++) {
            Steps steps;
            const float low = kept.low[at], high = kept.high[at];
            const bool found = plan.floating
                                   ? float_steps_of(largest[plan.type], low, high, steps)
                                   : steps_of(plan.bits, largest[plan.type], low, high, steps);
            if (!found) return false;
            kept.base[at] = steps.base;
            kept.step[at] = inverse_of(steps.step);
            const uint16_t base = upper(steps.base), step = upper(steps.step);
            std::memcpy(out + 2 * i, plan.bits == 8 ? &step : &base, 2);
            if (plan.bits != 8) std::memcpy(out + 2 * (count + i), &step, 2);
        }
        out += (plan.bits == 8 ? 2 : 4) * count;
    }
    return true;
}

void read_steps(const Plan& plan, size_t lines, const uint8_t*& in, Scratch& kept) {
    const size_t count = plan.line();
    float *base = kept.base.data(), *step = kept.step.data();
    if (plan.bits == 8) {
        for (size_t i = 0; i < lines * count; i++) {
            step[i] = loaded<Element::kBf16>(in + 2 * i);
            base[i] = base_of(step[i]);
        }
        in += 2 * lines * count;
        return;
    }
    for (size_t line = 0; line < lines; line++, base += count, step += count, in += 4 * count) {
        for (size_t i = 0; i < count; i++) {
            base[i] = loaded<Element::kBf16>(in + 2 * i);
            step[i] = loaded<Element::kBf16>(in + 2 * (count + i));
        }
    }
}

}  // namespace

size_t encode_quantized(Codec codec, Element is, const Encoded& part, bool streaming,
                        uint8_t* out) {
    const Plan plan(codec, is, part.grid, part.raw_bytes);
    if (plan.size == 0 || plan.size >= part.raw_bytes) return kNoRoom;
    std::memset(out, 0, kQuantizedHeader);
    out[kElementAt] = static_cast<uint8_t>(is);
    out[kBitsAt] = plan.bits_byte();
    out[kByTokenAt] = plan.grid.by_token;
    put32(out + kRowsAt, plan.grid.rows);
    put32(out + kChannelsAt, plan.grid.channels);
    put32(out + kHeadAt, plan.grid.head);
    Scratch& kept = scratch(plan);
    uint8_t* params = out + kQuantizedHeader;
    Packer packer(plan, streaming, kept, params + plan.params);
    const TypeKernels& by = level().types[plan.type];
    const Grid& grid = plan.grid;
    const uint8_t* in = part.raw;
    for (size_t row = 0; row < plan.rows;) {
        const size_t span = plan.span(row);
        by.ranges[grid.by_token](in, span, grid.channels, grid.head, kept.low.data(),
                                 kept.high.data());
        if (!make_steps(plan, plan.lines(span), kept, params)) return kNoRoom;
        for (size_t done = 0; done < span;) {
            const size_t rows = std::min(plan.tile(), span - done);
            fetch(in + span * grid.channels * plan.width, rows * grid.channels * plan.width);
            by.codes[plan.kind()](in, rows, grid.channels, grid.head, kept.base.data(),
                                  kept.step.data(), packer.room());
            packer.add(rows * grid.channels);
            in += rows * grid.channels * plan.width;
            done += rows;
        }
        row += span;
    }
    packer.finish();
    return plan.size;
}

// Decodes values directly to their destination; returns false if that is not possible.
bool values_by_hand(const Plan& plan, const uint8_t* codes, size_t rows, const Scratch& kept,
                    uint8_t* out, bool streaming) {
#if KVTIER_X86
    const Grid& grid = plan.grid;
    const bool units = (grid.by_token ? grid.head : grid.channels) % kUnit == 0;
    if (codec_choice().level() == Level::kVbmi && plan.type == 0 && units && !plan.floating &&
        (!streaming || reinterpret_cast<uintptr_t>(out) % 64 == 0)) {
        constexpr decltype(&values_bf16<false, false>) kBy[2][2] = {
            {values_bf16<false, false>, values_bf16<false, true>},
            {values_bf16<true, false>, values_bf16<true, true>}};
        kBy[grid.by_token][streaming](codes, rows, grid.channels, kept.base.data(),
                                      kept.step.data(), out);
        return true;
    }
#endif
    return false;
}

bool decode_quantized(Element is, const Decoded& part, bool streaming) {
    if (part.bytes < kQuantizedHeader) return false;
    const uint8_t* const from = part.from;
    const Grid grid = {get32(from + kRowsAt), get32(from + kChannelsAt), get32(from + kHeadAt),
                       from[kByTokenAt] != 0};
    const Plan plan(part.codec, is, grid, part.raw_bytes);
    if (plan.size == 0 || plan.size != part.bytes || from[kByTokenAt] > 1 || from[3] != 0 ||
        from[kElementAt] != static_cast<uint8_t>(is) || from[kBitsAt] != plan.bits_byte()) {
        return false;
    }
    Scratch& kept = scratch(plan);
    const uint8_t* params = from + kQuantizedHeader;
    Unpacker unpacker(plan, kept, params + plan.params);
    const TypeKernels& by = level().types[plan.type];
    uint8_t* out = part.raw;
    for (size_t row = 0; row < plan.rows;) {
        const size_t span = plan.span(row);
        read_steps(plan, plan.lines(span), params, kept);
        for (size_t done = 0; done < span;) {
            const size_t rows = std::min(plan.tile(), span - done);
            const size_t elements = rows * grid.channels, nbytes = elements * plan.width;
            const uint8_t* const codes = unpacker.take(elements);
            if (streaming) prefetch_pages(out + kPagesAhead, nbytes);
            if (!values_by_hand(plan, codes, rows, kept, out, streaming)) {
                by.values[plan.kind()](codes, rows, grid.channels, grid.head, kept.base.data(),
                                       kept.step.data(), streaming ? kept.values.data() : out);
                if (streaming) put_bytes(out, kept.values.data(), nbytes, true);
            }
            out += nbytes, done += rows;
        }
        row += span;
    }
    return true;
}

}  // namespace kvtier::codec
