// Encodes and decodes parts with a device's kernels, built for the host.
#pragma once

// Selects the substitute for CUDA's threads: lanes in a loop, or a thread for each lane. First: see
// lane_threads.h.
#ifndef KVTIER_HOST_KERNELS
#define KVTIER_HOST_KERNELS "host_kernels.h"
#endif
#include KVTIER_HOST_KERNELS

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <numbers>
#include <vector>

#include "codec/calibration.h"
#include "codec/codec.h"

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

// Parts of one codec, and everything that its kernels need. The caller keeps all of their bytes.
class HostBatch {
 public:
    HostBatch(codec::Codec codec, codec::Element element) : codec_(codec), element_(element) {}

    unsigned grid = 3, threads = static_cast<unsigned>(kLanes) * kWarps;

    // A part to decode. `more` units have no rows; `kept`: it is stored raw.
    void add(const uint8_t* text, size_t nbytes, uint8_t* raw, size_t raw_bytes,
             const HostKnown* known, bool heads_first, bool kept = false, uint32_t more = 0) {
        Part& part = added(raw, raw_bytes, known, heads_first, more);
        part.text = address(text), part.text_bytes = nbytes, part.kept = kept;
    }

    // A part to encode. r32 needs `more` to be 0.
    void add(const uint8_t* raw, size_t raw_bytes, const codec::Grid& grid, const HostKnown* known,
             bool heads_first, uint32_t position, uint32_t more = 0) {
        Part& part = added(raw, raw_bytes, known, heads_first, more);
        part.rows = grid.rows, part.channels = grid.channels, part.head = grid.head;
        part.by_token = grid.by_token;
        part.position = position;
    }

    void decode() {
        switch (codec_) {
            case codec::Codec::kFix4:
                return run({lossless::kvtier_fix4_count, lossless::kvtier_fix4_decode});
            case codec::Codec::kR32:
                return run({lossless::kvtier_r32_decode});
            case codec::Codec::kEcsq:
            case codec::Codec::kCachegen:
                return run(
                    {calibrated::kvtier_calibrated_numbers, calibrated::kvtier_calibrated_values});
            default:
                return run({quantized::kvtier_quantized_decode});
        }
    }

    // All parts into one payload.
    void encode(uint8_t* out) {
        uint64_t raw_bytes = 0;
        for (const Part& part : parts_) raw_bytes += part.raw_bytes;
        for (Part& part : parts_) {
            // More than any codec needs.
            scratch_.push_back(
                std::make_unique<uint64_t[]>(part.raw_bytes + part.units * 100'000 / 8 + 64));
            part.scratch = address(scratch_.back().get());
            part.text = address(out), part.text_bytes = raw_bytes;
            part.parts = static_cast<uint32_t>(parts_.size());
        }
        switch (codec_) {
            case codec::Codec::kFix4:
                return run({lossless::kvtier_fix4_begin, lossless::kvtier_fix4_measure,
                            kvtier_settle, lossless::kvtier_fix4_place});
            case codec::Codec::kR32:
                return run({lossless::kvtier_r32_begin, lossless::kvtier_r32_measure, kvtier_settle,
                            lossless::kvtier_r32_place});
            case codec::Codec::kEcsq:
            case codec::Codec::kCachegen:
                return run({calibrated::kvtier_calibrated_measure, kvtier_settle,
                            calibrated::kvtier_calibrated_place});
            default:
                return run({quantized::kvtier_quantized_measure, kvtier_settle,
                            quantized::kvtier_quantized_place});
        }
    }

    // Of the parts in the order in which they were added.
    const std::vector<Result>& results() const { return results_; }

 private:
    static uint64_t address(const void* of) { return reinterpret_cast<uint64_t>(of); }

    Part& added(const void* raw, size_t raw_bytes, const HostKnown* known, bool heads_first,
                uint32_t more) {
        constexpr size_t kWidths[] = {2, 2, 4, 1, 1};
        const size_t elements = raw_bytes / kWidths[static_cast<size_t>(element_)];
        const unsigned bits = codec::fixed_rate(codec_);
        const size_t of_unit = bits != 0 ? 4096 : codec::kStreamSymbols;
        Part part = {};
        part.raw = address(raw), part.raw_bytes = raw_bytes;
        part.element = static_cast<uint32_t>(element_);
        part.unit = static_cast<uint32_t>(owners_.size());
        part.units =
            static_cast<uint32_t>((std::max<size_t>(elements, 1) - 1) / of_unit + 1) + more;
        part.bits = bits;
        if (known != nullptr) part.known = known->at();
        part.heads_first = heads_first;
        owners_.resize(owners_.size() + part.units, static_cast<uint32_t>(parts_.size()));
        measures_.resize(owners_.size());
        results_.emplace_back();
        return parts_.emplace_back(part);
    }

    void run(std::initializer_list<CodecKernel::Call*> kernels) {
        const uint32_t payload = 0;  // its first part
        for (CodecKernel::Call* const kernel : kernels) {
            const bool whole = kernel == kvtier_settle;
            run_on_host<kLanes>(grid, threads, kernel, parts_.data(),
                                whole ? &payload : owners_.data(),
                                whole ? 1 : static_cast<uint32_t>(owners_.size()), measures_.data(),
                                results_.data());
        }
    }

    codec::Codec codec_;
    codec::Element element_;
    std::vector<Part> parts_;
    std::vector<uint32_t> owners_;
    std::vector<Measure> measures_;
    std::vector<Result> results_;
    std::vector<std::unique_ptr<uint64_t[]>> scratch_;
};

}  // namespace kvtier::cuda
