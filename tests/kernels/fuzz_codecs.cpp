// Decodes damaged parts with decoders that are built with the sanitizers: each part is refused or
// gives bytes, and the decoder accesses no other memory. Reorders pages of any order, and back.
// Compares a device's kernels, built for the host: they write the same bytes, refuse the same parts
// and decode the others alike. `fuzz_codecs ROUNDS SEED` prints how many parts were refused.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codec/calibration.h"
#include "codec/codec.h"
#include "codec/parts.h"
#include "codec/reorder.h"
#include "host_codecs.h"
#include "odd_parts.h"

using namespace kvtier;
using namespace kvtier::codec;

namespace {

class Fuzz : OddParts {
 public:
    explicit Fuzz(uint64_t seed) : OddParts(seed) {}

    // Damages one encoded part `times` times.
    void round(size_t times) {
        const auto& levels = codec_choice().levels();
        codec_choice().choose(levels[below(levels.size())]);
        constexpr Codec kCodecs[] = {Codec::kFix4,  Codec::kR32,    Codec::kQ8,   Codec::kQ4,
                                     Codec::kQ2,    Codec::kFp8,    Codec::kE5m2, Codec::kNvfp4,
                                     Codec::kMxfp4, Codec::kPlanes, Codec::kEcsq, Codec::kCachegen};
        // Selects the two codecs with the most code of their own as often as all others together.
        const Codec codec = kCodecs[below(2) == 0 ? 10 + below(2) : below(10)];
        const auto element = static_cast<Element>(below(kElements));
        // Whole units have code of their own.
        const size_t heads = 1 + below(3), head = below(4) == 0 ? kUnit : 1 + below(90);
        // At first, and sometimes later, large enough to bypass the caches.
        const bool large = damaged == 0 || below(400) == 0;
        const size_t rows = large ? (size_t{1} << 20) / heads / head + 1 : 1 + below(60);
        const Grid grid = {static_cast<uint32_t>(rows), static_cast<uint32_t>(heads * head),
                           static_cast<uint32_t>(head), below(2) == 0};
        const size_t width = element == Element::kFp32 ? 4 : element <= Element::kFp16 ? 2 : 1;
        const bool odd = lossless(codec) && below(3) == 0;
        // Several streams together, or many of them.
        const size_t many = codec == Codec::kR32 && below(8) == 0 ? 40000 + below(2) * 100000 : 0;
        const Exactly raw((rows * heads * head + many) * width + (odd ? below(4) : 0));
        fill(raw, width, heads * head * width);
        channels_ = calibrated(codec) ? &known(codec, heads, head) : nullptr;
        if (channels_ == nullptr) device_known_.reset();
        heads_first_ = below(2) == 0;
        std::vector<Encoded> parts = {{raw.at.get(), raw.size, Codec::kRaw, 0, grid, channels_,
                                       heads_first_, static_cast<uint32_t>(chance_())}};
        Exactly room(raw.size);
        const size_t nbytes = encode(codec, element, parts, room.at.get());
        if (!decodes(element, parts[0].codec, room.at.get(), nbytes, raw)) fail("is not decoded");
        encodes_alike(codec, element, parts[0], raw, room);
        if (lossless(parts[0].codec) && std::memcmp(back_.data(), raw.at.get(), raw.size) != 0) {
            fail("comes back as something else");
        }
        if (large) times = 2;
        for (size_t i = 0; i < times; i++) {
            std::vector<uint8_t> text(room.at.get(), room.at.get() + nbytes);
            if (codec == Codec::kR32 && i == 0) {
                starve(text);
            } else {
                damage(text);
            }
            const Exactly copy(text.size());
            if (!text.empty()) std::memcpy(copy.at.get(), text.data(), text.size());
            const Codec taken = parts[0].codec == Codec::kRaw ? codec : parts[0].codec;
            refused += !decodes(element, taken, copy.at.get(), copy.size, raw);
            damaged++;
        }
    }

    // Puts a page of any order into parts and back, whole and piece by piece.
    void reorders() {
        codec_choice().choose(codec_choice().levels()[below(codec_choice().levels().size())]);
        constexpr size_t kTokens[] = {1, 6, 16, 32, 48, 96}, kDims[] = {1, 3, 8, 16, 20, 64, 72};
        const size_t sizes[] = {1 + below(3), kTokens[below(6)], kDims[below(7)], 2};
        Order order;
        order.parts = sizes[3];
        std::vector<uint32_t>* const places[] = {&order.heads, &order.tokens, &order.dims};
        std::vector<Axis> axes = {{0, 1, sizes[0]}, {3, 1, sizes[3]}};
        for (const size_t axis : {1, 2}) {
            const size_t size = sizes[axis], by = size_t{1} << below(6);
            const size_t within = size % by == 0 ? by : 1;
            axes.push_back({axis, 1, within});
            axes.push_back({axis, within, size / within});
        }
        std::shuffle(axes.begin() + (below(2) == 0 ? 1 : 0), axes.end(), chance_);
        size_t strides[4][128] = {}, stride = 1;
        for (auto axis = axes.rbegin(); axis != axes.rend(); axis++) {
            for (size_t i = 0; i < sizes[axis->number]; i++) {
                strides[axis->number][i] += i / axis->step % axis->extent * stride;
            }
            stride *= axis->extent;
        }
        for (size_t part = 0; part < order.parts; part++) {
            for (size_t axis = 0; axis < 3; axis++) {
                for (size_t i = 0; i < sizes[axis]; i++) {
                    const size_t more = axis == 0 ? strides[3][part] : 0;
                    places[axis]->push_back(static_cast<uint32_t>(strides[axis][i] + more));
                }
            }
        }
        if (!order.prepare()) fail("has an order that is none");
        const size_t width = below(2) == 0 ? 2 : 4, size = order.page() * width;
        const Exactly page(size), parts(size), back(size), piece(size / order.pieces);
        for (size_t i = 0; i < size; i++) page.at[i] = static_cast<uint8_t>(chance_());
        reorder(order, width, page.at.get(), parts.at.get(), 1, false);
        reorder(order, width, parts.at.get(), back.at.get(), 1, true);
        if (std::memcmp(page.at.get(), back.at.get(), size) != 0) fail("is in another order");
        for (size_t i = 0; i < order.pieces; i++) {
            reorder_piece(order, width, parts.at.get(), i, piece.at.get());
            if (std::memcmp(page.at.get() + i * piece.size, piece.at.get(), piece.size) != 0) {
                fail("is another in pieces");
            }
        }
    }

    size_t damaged = 0, refused = 0;

 private:
    struct Axis {
        size_t number, step, extent;
    };

    [[noreturn]] void fail(const char* what) {
        std::fprintf(stderr, "what was encoded %s\n", what);
        std::abort();
    }

    // A device writes the same bytes.
    void encodes_alike(Codec codec, Element element, const Encoded& part, const Exactly& raw,
                       const Exactly& room) {
        if (codec == Codec::kPlanes) return levels_encode_alike(element, part, raw, room);
        cuda::HostBatch device(codec, element);
        const Exactly out(raw.size);
        device.add(raw.at.get(), raw.size, part.grid, device_known_.get(), heads_first_,
                   part.position);
        device.encode(out.at.get());
        const cuda::Result& result = device.results()[0];
        if ((result.kept != 0) != (part.codec == Codec::kRaw) || result.bytes != part.bytes ||
            std::memcmp(out.at.get(), room.at.get(), part.bytes) != 0) {
            fail("is something else on a device");
        }
    }

    // Frames of a daemon's memory never reach a device: the other levels write the same bytes.
    void levels_encode_alike(Element element, const Encoded& part, const Exactly& raw,
                             const Exactly& room) {
        const Level chosen = codec_choice().level();
        for (const Level level : codec_choice().levels()) {
            codec_choice().choose(level);
            Encoded again = {raw.at.get(), raw.size, Codec::kRaw, 0};
            const Exactly out(raw.size);
            encode(Codec::kPlanes, element, {&again, 1}, out.at.get());
            if (again.codec != part.codec || again.bytes != part.bytes ||
                std::memcmp(out.at.get(), room.at.get(), part.bytes) != 0) {
                fail("is something else on another level");
            }
        }
        codec_choice().choose(chosen);
    }

    void levels_decode_alike(Element element, const uint8_t* text, size_t nbytes,
                             const Exactly& raw, bool sound) {
        const Level chosen = codec_choice().level();
        for (const Level level : codec_choice().levels()) {
            codec_choice().choose(level);
            const Exactly back(raw.size);
            const Decoded part = {text, nbytes, Codec::kPlanes, back.at.get(), raw.size};
            if ((decode(element, {&part, 1}) == 1) != sound) fail("is sound on some levels");
            if (sound && std::memcmp(back.at.get(), back_.data(), raw.size) != 0) {
                fail("comes back as something else on another level");
            }
        }
        codec_choice().choose(chosen);
    }

    // A device decodes the same result. The encoded bytes begin at an odd address.
    void decodes_alike(Element element, Codec codec, const uint8_t* text, size_t nbytes,
                       const Exactly& raw, bool sound) {
        if (codec == Codec::kRaw) return;
        if (codec == Codec::kPlanes) return levels_decode_alike(element, text, nbytes, raw, sound);
        cuda::HostBatch device(codec, element);
        const Exactly odd(nbytes + 1), back(raw.size);
        if (nbytes != 0) std::memcpy(odd.at.get() + 1, text, nbytes);
        device.add(odd.at.get() + 1, nbytes, back.at.get(), raw.size, device_known_.get(),
                   heads_first_);
        device.decode();
        if ((device.results()[0].bad == 0) != sound) {
            fail("is sound here, and not on a device, or the other way round");
        }
        if (sound && std::memcmp(back.at.get(), back_.data(), raw.size) != 0) {
            fail("comes back as something else on a device");
        }
    }

    bool decodes(Element element, Codec codec, const uint8_t* text, size_t nbytes,
                 const Exactly& raw) {
        const Exactly back(raw.size);
        const Decoded part = {text,     nbytes,    codec,       back.at.get(),
                              raw.size, channels_, heads_first_};
        const bool sound = decode(element, {&part, 1}) == 1;
        back_.assign(back.at.get(), back.at.get() + raw.size);
        decodes_alike(element, codec, text, nbytes, raw, sound);
        return sound;
    }

    std::vector<uint8_t> back_;
    const Channels* channels_ = nullptr;
    bool heads_first_ = false;
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const size_t wanted = std::strtoull(arguments[1], nullptr, 10);
    Fuzz fuzz(std::strtoull(arguments[2], nullptr, 10));
    while (fuzz.damaged < wanted) {
        fuzz.round(20);
        fuzz.reorders();
    }
    std::printf("%zu damaged, %zu refused\n", fuzz.damaged, fuzz.refused);
}
