// Encodes and decodes one part with a device's kernels, built for the host.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <vector>

#include "codec/calibration.h"
#include "codec/codec.h"
// Selects the substitute for CUDA's threads: lanes in a loop, or a thread for each lane.
#ifndef KVTIER_HOST_KERNELS
#define KVTIER_HOST_KERNELS "host_kernels.h"
#endif
#include KVTIER_HOST_KERNELS

namespace kvtier::cuda {

// The content of a profile about a part, in the form that kernels need.
class HostKnown {
 public:
    HostKnown(const codec::Channels& of, std::vector<uint8_t> exponents,
              std::vector<uint8_t> anchors)
        : means_(of.means), exponents_(std::move(exponents)), anchors_(std::move(anchors)) {
        if (of.rope) turns_ = of.rope->turns;
        for (size_t i = 0; i < codec::kTurn; i++) {
            cosines_[i] = cosine(i);
            sines_[i] = cosine((i + codec::kTurn * 3 / 4) % codec::kTurn);
        }
        is_ = {address(means_.data()),
               address(exponents_.data()),
               address(anchors_.data()),
               address(turns_.data()),
               address(cosines_),
               address(sines_),
               static_cast<uint32_t>(of.heads),
               static_cast<uint32_t>(of.dim),
               static_cast<uint32_t>(of.exact),
               static_cast<uint32_t>(of.group),
               of.level,
               static_cast<uint32_t>(of.symbols),
               static_cast<uint32_t>(turns_.size()),
               of.rope && of.rope->interleaved,
               of.codec == codec::Codec::kCachegen,
               0,
               {}};
        std::memcpy(is_.frequencies, of.frequencies, sizeof is_.frequencies);
    }

    uint64_t at() const { return address(&is_); }

 private:
    static uint64_t address(const void* of) { return reinterpret_cast<uint64_t>(of); }
    // Like the CPU's table: zeros and ones are exact.
    static float cosine(size_t k) {
        if (k > codec::kTurn / 2) k = codec::kTurn - k;
        if (k > codec::kTurn / 4) return -cosine(codec::kTurn / 2 - k);
        const auto angle = [](size_t i) {
            return 2 * std::numbers::pi * static_cast<double>(i) / double{codec::kTurn};
        };
        if (k == codec::kTurn / 4) return 0.0F;
        return static_cast<float>(k <= codec::kTurn / 8 ? std::cos(angle(k))
                                                        : std::sin(angle(codec::kTurn / 4 - k)));
    }

    std::vector<float> means_;
    std::vector<uint8_t> exponents_, anchors_;
    std::vector<uint64_t> turns_;
    float cosines_[codec::kTurn], sines_[codec::kTurn];
    calibrated::ProfilePart is_;
};

// A part, and everything that its kernels need.
class HostPart {
 public:
    HostPart(codec::Codec codec, codec::Element element, size_t raw_bytes, const HostKnown* known)
        : codec_(codec) {
        constexpr size_t kWidths[] = {2, 2, 4, 1, 1};
        const size_t elements = raw_bytes / kWidths[static_cast<size_t>(element)];
        const bool fp8 = codec == codec::Codec::kFp8;
        const bool fixed = fp8 || (codec >= codec::Codec::kQ8 && codec <= codec::Codec::kQ2);
        // More units than a part has are harmless.
        const size_t units = elements / (fixed ? 4096 : codec::kStreamSymbols) + 1;
        part_.raw_bytes = raw_bytes;
        part_.element = static_cast<uint32_t>(element);
        part_.units = static_cast<uint32_t>(units);
        part_.parts = 1;
        part_.bits = fp8                          ? 8 | codec::kFloating
                     : codec == codec::Codec::kQ8 ? 8
                     : codec == codec::Codec::kQ4 ? 4
                                                  : 2;
        if (known != nullptr) part_.known = known->at();
        measures_.resize(units);
        owners_.resize(units);
    }

    // True if the part is valid; then `raw` has its content.
    bool decode(const uint8_t* text, size_t nbytes, bool heads_first, uint8_t* raw) {
        part_.raw = address(raw), part_.text = address(text), part_.text_bytes = nbytes;
        part_.heads_first = heads_first;
        switch (codec_) {
            case codec::Codec::kFix4:
                run(lossless::kvtier_fix4_count), run(lossless::kvtier_fix4_decode);
                break;
            case codec::Codec::kR32:
                run(lossless::kvtier_r32_decode);
                break;
            case codec::Codec::kEcsq:
            case codec::Codec::kCachegen:
                run(calibrated::kvtier_calibrated_numbers);
                run(calibrated::kvtier_calibrated_values);
                break;
            default:
                run(quantized::kvtier_quantized_decode);
        }
        return result_.bad == 0;
    }

    // The encoded size; 0 if the part is stored raw.
    size_t encode(const uint8_t* raw, const codec::Grid& grid, bool heads_first, uint32_t position,
                  uint8_t* out) {
        // More than any codec needs.
        const auto scratch =
            std::make_unique<uint64_t[]>(part_.raw_bytes + measures_.size() * 100'000 / 8 + 64);
        part_.scratch = address(scratch.get());
        part_.raw = address(raw), part_.text = address(out), part_.text_bytes = part_.raw_bytes;
        part_.rows = grid.rows, part_.channels = grid.channels, part_.head = grid.head;
        part_.by_token = grid.by_token;
        part_.heads_first = heads_first, part_.position = position;
        switch (codec_) {
            case codec::Codec::kFix4:
                run(lossless::kvtier_fix4_begin), run(lossless::kvtier_fix4_measure);
                run(kvtier_settle), run(lossless::kvtier_fix4_place);
                break;
            case codec::Codec::kR32:
                run(lossless::kvtier_r32_begin), run(lossless::kvtier_r32_measure);
                run(kvtier_settle), run(lossless::kvtier_r32_place);
                break;
            case codec::Codec::kEcsq:
            case codec::Codec::kCachegen:
                run(calibrated::kvtier_calibrated_measure), run(kvtier_settle);
                run(calibrated::kvtier_calibrated_place);
                break;
            default:
                run(quantized::kvtier_quantized_measure), run(kvtier_settle);
                run(quantized::kvtier_quantized_place);
        }
        return result_.kept ? 0 : result_.bytes;
    }

    Result& result() { return result_; }

 private:
    static uint64_t address(const void* of) { return reinterpret_cast<uint64_t>(of); }
    void run(CodecKernel::Call* kernel) {
        const auto count = kernel == kvtier_settle ? 1 : static_cast<uint32_t>(owners_.size());
        run_on_host<kLanes>(3, kLanes * kWarps, kernel, &part_, owners_.data(), count,
                            measures_.data(), &result_);
    }

    codec::Codec codec_;
    Part part_ = {};
    std::vector<Measure> measures_;
    std::vector<uint32_t> owners_;  // all of them belong to the one part
    Result result_ = {};
};

}  // namespace kvtier::cuda
