// Decodes damaged frames step by step with a decoder that is built with the sanitizers: each frame
// is refused or gives the encoded block, and the decoder does not read bytes that have not arrived.
// `fuzz_frames ROUNDS SEED` prints how many frames were refused.
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codec/codec.h"
#include "codec/recipe.h"
#include "frame.h"

using namespace kvtier;
using namespace kvtier::codec;

namespace {

// The offsets of a header, as in kvtier_daemon/codec/frame.py.
constexpr size_t kHeader = 256, kEntry = 32, kVersionAt = 4, kHeaderBytesAt = 8,
                 kPayloadBytesAt = 16, kRawBytesAt = 24, kEntriesAt = 148;

// Exactly sized, so that the sanitizer detects accesses outside.
struct Exactly {
    explicit Exactly(size_t nbytes) : size(nbytes), at(new uint8_t[nbytes]) {}
    Exactly(const uint8_t* from, size_t nbytes) : Exactly(nbytes) {
        if (nbytes != 0) std::memcpy(at.get(), from, nbytes);
    }
    size_t size;
    std::unique_ptr<uint8_t[]> at;
};

template <typename T>
void put(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

class Fuzz {
 public:
    explicit Fuzz(uint64_t seed) : chance_(seed) {}

    // Damages one frame `times` times.
    void round(size_t times) {
        const auto& levels = codec_choice().levels();
        codec_choice().choose(levels[below(levels.size())]);
        constexpr Codec kCodecs[] = {Codec::kFix4,  Codec::kR32,  Codec::kPlanes, Codec::kQ8,
                                     Codec::kQ4,    Codec::kQ2,   Codec::kFp8,    Codec::kE5m2,
                                     Codec::kNvfp4, Codec::kMxfp4};
        const Codec codec = kCodecs[below(10)];
        in_memory_ = codec == Codec::kPlanes;
        element_ = static_cast<Element>(below(lossless(codec) ? 5 : 3));
        const size_t width = element_ == Element::kFp32 ? 4 : element_ <= Element::kFp16 ? 2 : 1;
        // Sometimes several runs.
        const size_t count = 1 + below(12), each = (16 + below(below(30) == 0 ? 2000 : 40)) * 64;
        const size_t channels = 64, rows = each / channels;
        const Exactly block(count * each * width);
        for (size_t i = 0; i < block.size; i++) {
            const auto one = static_cast<uint8_t>(chance_());
            const bool upper = width == 1 || i % width == width - 1;
            block.at[i] = upper ? static_cast<uint8_t>(0x3C + (one & 0x83)) : one;
        }
        std::vector<uint8_t> header(kHeader + count * kEntry + below(2) * 100);
        std::memcpy(header.data(), "KVTf", 4);
        put<uint16_t>(&header[kVersionAt], 1);
        put(&header[kHeaderBytesAt], static_cast<uint32_t>(header.size()));
        put(&header[kPayloadBytesAt], uint64_t{block.size});
        put(&header[kRawBytesAt], uint64_t{block.size});
        put(&header[kEntriesAt], static_cast<uint32_t>(count));
        for (size_t i = 0; i < count; i++) {
            uint8_t* const entry = &header[kHeader + i * kEntry];
            put(entry, static_cast<uint16_t>(i / 2));
            entry[2] = static_cast<uint8_t>(i % 2);
            put(entry + 4, static_cast<uint32_t>(i * each * width));
            put(entry + 8, static_cast<uint32_t>(each * width));
            put(entry + 12, static_cast<uint32_t>(each * width));
        }
        const Exactly into(block.size);
        Recipe recipe;
        recipe.codec = codec;
        const std::vector<Grid> grids(count, {static_cast<uint32_t>(rows),
                                              static_cast<uint32_t>(channels), 32, below(2) == 0});
        lossy_ = lossless(codec) ? nullptr : &recipe;
        const size_t nbytes =
            lossy_ == nullptr ? encode_frame(codec, element_, header.data(), header.size(),
                                             block.at.get(), block.size, into.at.get())
                              : encode_frame(recipe, element_, header.data(), header.size(),
                                             block.at.get(), block.size, grids, 0, into.at.get());
        if (nbytes == 0) fail("has no frame");
        if (nbytes == block.size) return;  // no part shrinks
        std::vector<uint8_t> payload(into.at.get(), into.at.get() + nbytes);
        block_.assign(block.at.get(), block.at.get() + block.size);
        if (!seal(header, payload)) fail("has no header");
        if (lossy_ != nullptr) {
            expected_ = false;
            if (!decodes(header, payload)) fail("is not decoded");
            block_ = back_;
        }
        expected_ = true;
        if (!decodes(header, payload)) fail("is not decoded");
        for (size_t i = 0; i < times; i++) {
            auto bad_header = header, bad_payload = payload;
            damage(below(3) == 0 ? bad_header : bad_payload);
            if (below(4) == 0) damage(bad_header);
            // Mostly with valid digests, otherwise the decoder would check nothing else.
            if (below(5) != 0) seal(bad_header, bad_payload);
            refused += !decodes(bad_header, bad_payload);
            damaged++;
        }
    }

    size_t damaged = 0, refused = 0;

 private:
    size_t below(size_t end) { return chance_() % end; }

    [[noreturn]] void fail(const char* what) {
        std::fprintf(stderr, "a block %s\n", what);
        std::abort();
    }

    bool seal(std::vector<uint8_t>& header, const std::vector<uint8_t>& payload) {
        return seal_frame(header.data(), header.size(), payload.data(), payload.size(),
                          digest_.data());
    }

    void damage(std::vector<uint8_t>& text) {
        for (size_t times = 1 + below(4); times != 0 && !text.empty(); times--) {
            const size_t at = below(2) == 0
                                  ? below(std::min<size_t>(text.size(), kHeader + 2 * kEntry))
                                  : below(text.size());
            switch (below(5)) {
                case 0:
                    text[at] ^= static_cast<uint8_t>(1u << below(8));
                    break;
                case 1:
                    text[at] = static_cast<uint8_t>(chance_());
                    break;
                case 2:
                    if (at / 4 * 4 + 4 <= text.size()) {
                        put(&text[at / 4 * 4], static_cast<uint32_t>(below(text.size() + 2)));
                    }
                    break;
                case 3:
                    if (below(8) == 0) text.resize(at);
                    break;
                default:
                    for (size_t i = at; i < std::min(at + below(60), text.size()); i++) {
                        text[i] = static_cast<uint8_t>(chance_());
                    }
            }
        }
    }

    // Decodes a frame in a few steps while it arrives; then compares the block.
    bool decodes(const std::vector<uint8_t>& header, const std::vector<uint8_t>& payload) {
        const Exactly head(header.data(), header.size()), text(payload.data(), payload.size());
        const Exactly back(block_.size());
        FrameDecoder decoder(lossy_, element_, head.at.get(), head.size, text.at.get(), text.size,
                             in_memory_ ? nullptr : digest_.data(), back.at.get(), back.size);
        std::vector<size_t> steps;
        for (size_t i = below(5); i != 0; i--) steps.push_back(below(text.size + 1));
        std::sort(steps.begin(), steps.end());
        bool sound = true, whole = false;
        ASAN_POISON_MEMORY_REGION(text.at.get(), text.size);
        for (const size_t arrived : steps) {
            ASAN_UNPOISON_MEMORY_REGION(text.at.get(), arrived);
            sound = decoder.take(arrived);
            whole = arrived == text.size;
            if (!sound || whole) break;
        }
        ASAN_UNPOISON_MEMORY_REGION(text.at.get(), text.size);
        if (sound && !whole) sound = decoder.take(text.size);
        if (std::memcmp(head.at.get(), header.data(), head.size) != 0) fail("changes its header");
        back_.assign(back.at.get(), back.at.get() + back.size);
        if (sound && expected_ && back_ != block_) fail("comes back as something else");
        return sound;
    }

    std::mt19937_64 chance_;
    std::vector<uint8_t> block_, back_;
    std::array<uint8_t, kDigestBytes> digest_{};
    Element element_ = Element::kBf16;
    const Recipe* lossy_ = nullptr;
    bool expected_ = true;
    bool in_memory_ = false;  // its payload has no digest
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const size_t wanted = std::strtoull(arguments[1], nullptr, 10);
    Fuzz fuzz(std::strtoull(arguments[2], nullptr, 10));
    while (fuzz.damaged < wanted) fuzz.round(20);
    std::printf("%zu damaged, %zu refused\n", fuzz.damaged, fuzz.refused);
}
