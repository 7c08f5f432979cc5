// Parts of all kinds, profiles for them, and damage to encoded parts; all by a seed. Include
// host_codecs.h first.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codec/calibration.h"
#include "codec/codec.h"
#include "codec/parts.h"

namespace kvtier {

using namespace kvtier::codec;

// Exactly sized, so that the sanitizer detects accesses outside.
struct Exactly {
    explicit Exactly(size_t nbytes) : size(nbytes), at(new uint8_t[nbytes]) {}
    size_t size;
    std::unique_ptr<uint8_t[]> at;
};

class OddParts {
 protected:
    explicit OddParts(uint64_t seed) : chance_(seed) {}

    size_t below(size_t end) { return chance_() % end; }

    // A possible profile for such a part.
    const Channels& known(Codec codec, size_t heads, size_t head) {
        const size_t exact = below(4) == 0 ? below(head) : 0, coded = head - exact;
        std::shared_ptr<const Rope> rope;
        if (coded > 1 && below(3) != 0) {
            std::vector<uint64_t> turns(1 + below(coded / 2));
            for (uint64_t& turn : turns) turn = chance_();
            rope = std::make_shared<const Rope>(std::move(turns), below(2) == 0);
        }
        const std::vector<float> means(heads * coded, 0.25F);
        std::vector<uint8_t> exponents(heads * coded), anchors(heads * coded);
        for (uint8_t& exponent : exponents) exponent = static_cast<uint8_t>(100 + below(60));
        for (uint8_t& exponent : anchors) exponent = static_cast<uint8_t>(90 + below(40));
        const size_t symbols = 4 + 2 * below(15);
        std::vector<uint8_t> table(symbols, 1);
        for (size_t left = kScale - symbols; left != 0; left--) table[below(symbols)]++;
        made_ = std::make_unique<Channels>(
            codec, below(3), 1 + below(20),
            Channels::Parameters{heads, head, exact, rope, means.data(), means.size(),
                                 anchors.data(), exponents.data(), table.data(), anchors.size(),
                                 exponents.size(), symbols});
        device_known_ = std::make_unique<cuda::HostKnown>(*made_, exponents, anchors);
        return *made_;
    }

    // Nearly normal values with repeated exponents; sometimes random bits, zeros of both signs,
    // denormals, one element or one row repeated, or infinities and NaN among others.
    void fill(const Exactly& raw, size_t width, size_t row) {
        enum { kWild, kZeros, kDenormals, kOneElement, kOneRow, kNotFinite, kKinds };
        const size_t kind = below(2 * kKinds);
        for (size_t i = 0; i < raw.size; i++) {
            const auto one = static_cast<uint8_t>(chance_());
            const size_t above = width - 1 - i % width;  // the bytes after it in its element
            raw.at[i] =
                kind == kWild || above != 0 ? one : static_cast<uint8_t>(0x3C + (one & 0x83));
            if (kind == kZeros || kind == kDenormals) {
                const unsigned rest = kind == kZeros ? 0 : width == 1 ? 3 : 0x7F;
                const unsigned stays = above == 0   ? 0x80 | (width == 1 ? rest : 0)
                                       : above == 1 ? rest
                                                    : (rest != 0 ? 0xFF : 0);
                raw.at[i] = static_cast<uint8_t>(one & stays);
            }
            const size_t period = kind == kOneElement ? width : row;
            if ((kind == kOneElement || kind == kOneRow) && i >= period) {
                raw.at[i] = raw.at[i - period];
            }
        }
        if (kind != kNotFinite) return;
        constexpr uint8_t kUppers[] = {0x7C, 0x7F, 0xFC, 0xFF};
        const size_t at = below(raw.size / width) * width;
        std::memset(raw.at.get() + at, below(2) == 0 ? 0 : 0x80, width - 1);
        raw.at[at + width - 1] = kUppers[below(4)];
    }

    // Turns all words of r32's streams into escapes: no word is left, and everything else is valid.
    static void starve(std::vector<uint8_t>& text) {
        for (size_t at = kR32Header; at + kStreamEntry <= text.size(); at += kStreamEntry) {
            if ((at - kR32Header) / kStreamEntry == get32(text.data() + kCountAt)) return;
            uint8_t* const entry = text.data() + at;
            put32(entry + 4, get32(entry + 4) + 2 * size_t{get32(entry)});
            put32(entry, 0);
        }
    }

    void damage(std::vector<uint8_t>& text) {
        for (size_t times = 1 + below(3) * below(12); times != 0; times--) {
            if (text.empty()) return;
            const size_t near = below(std::min<size_t>(text.size(), 64));
            const size_t at = below(2) == 0 ? near : below(text.size());
            switch (below(8)) {
                case 0:
                    text[at] ^= static_cast<uint8_t>(1u << below(8));
                    break;
                case 1: {
                    constexpr uint8_t kEdges[] = {0, 1, 2, 31, 32, 33, 127, 128, 254, 255};
                    text[at] = kEdges[below(10)];
                    break;
                }
                case 2:
                    text[at] = static_cast<uint8_t>(chance_());
                    break;
                case 3: {
                    constexpr uint32_t kNumbers[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
                    const uint32_t number =
                        below(2) == 0 ? kNumbers[below(5)] : static_cast<uint32_t>(below(1 << 18));
                    if (near / 4 * 4 + 4 <= text.size()) {
                        std::memcpy(text.data() + near / 4 * 4, &number, 4);
                    }
                    break;
                }
                case 4:
                    text.resize(below(8) == 0 ? at : text.size());
                    break;
                case 5:
                    if (below(8) == 0) text.insert(text.end(), below(80), text[at]);
                    break;
                case 6:
                    starve(text);
                    break;
                default:
                    for (size_t i = at; i < std::min(at + below(40), text.size()); i++) {
                        text[i] = static_cast<uint8_t>(chance_());
                    }
            }
        }
    }

    std::mt19937_64 chance_;
    std::unique_ptr<Channels> made_;
    std::unique_ptr<cuda::HostKnown> device_known_;
};

}  // namespace kvtier
