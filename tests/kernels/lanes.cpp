// Runs the kernels of a device with a thread per lane, several warps and thread blocks, and
// compares all results with those of the processor. Built with ThreadSanitizer, which reports two
// lanes that access the same bytes without a barrier between them.
//
//     lanes CODEC DAMAGED SEED    encodes and decodes parts of each type, decodes damaged parts
//     lanes copies ROUNDS SEED    copies blocks
//     lanes digests ROUNDS SEED   digests ranges
#define KVTIER_HOST_KERNELS "lane_threads.h"
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "host_codecs.h"
#include "odd_parts.h"
#include "xxh3.h"

using namespace kvtier;

namespace {

struct Shape {
    unsigned grid, threads;
};
// One block of four warps, as they are launched; two blocks of two, whose warps do not share
// memory.
constexpr Shape kShapes[] = {{1, 128}, {2, 64}, {2, 128}};

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "with a thread per lane, %s\n", what);
    std::exit(1);
}

class Codecs : OddParts {
 public:
    Codecs(Codec codec, uint64_t seed) : OddParts(seed), codec_(codec) {}

    // Parts of one type, all as one batch; `damaged` damaged copies of them as another.
    void round(Element element, bool large, size_t copies) {
        element_ = element;
        const size_t heads = 1 + below(3), head = 1 + below(90);
        const size_t width = element == Element::kFp32 ? 4 : element <= Element::kFp16 ? 2 : 1;
        const HostKnownPointer by = calibrated(codec_) ? &known(codec_, heads, head) : nullptr;
        if (by == nullptr) device_known_.reset();
        heads_first_ = below(2) == 0;
        std::vector<Exactly> raws;
        std::vector<Encoded> parts;
        size_t all = 0;
        for (size_t i = 0; i < (large ? 2 : 1 + below(4)); i++) {
            // Large: more than one unit.
            const size_t unit = 32'768, least = large ? unit / heads / head + 1 : 1;
            const size_t rows = least + below(40);
            const size_t odd = codec_ <= Codec::kR32 && below(3) == 0 ? below(4) : 0;
            const Exactly& raw = raws.emplace_back(rows * heads * head * width + odd);
            fill(raw, width, heads * head * width);
            const Grid grid = {static_cast<uint32_t>(rows), static_cast<uint32_t>(heads * head),
                               static_cast<uint32_t>(head), below(2) == 0};
            parts.push_back({raw.at.get(), raw.size, Codec::kRaw, 0, grid, by, heads_first_,
                             static_cast<uint32_t>(chance_())});
            all += raw.size;
        }
        const Exactly payload(all), found(all);
        const size_t nbytes = encode(codec_, element, parts, payload.at.get());
        compare_encoded(parts, payload, found, nbytes);
        std::vector<Text> texts;
        size_t at = 0;
        for (const Encoded& part : parts) {
            texts.push_back({{payload.at.get() + at, payload.at.get() + at + part.bytes},
                             part.codec == Codec::kRaw,
                             part.raw_bytes});
            at += part.bytes;
        }
        compare_decoded(texts);
        std::vector<Text> damaged_texts;
        for (size_t i = 0; i < copies; i++) {
            Text text = texts[below(texts.size())];
            text.kept = text.kept && below(2) == 0;  // else it is taken for an encoded one
            damage(text.bytes);
            damaged_texts.push_back(std::move(text));
        }
        damaged += copies;
        refused += compare_decoded(damaged_texts);
    }

    size_t damaged = 0, refused = 0, encoded = 0;

 private:
    using HostKnownPointer = const Channels*;
    struct Text {
        std::vector<uint8_t> bytes;
        bool kept;
        size_t raw_bytes;
    };

    void shape(cuda::HostBatch& batch) {
        const Shape& shape = kShapes[below(std::size(kShapes))];
        batch.grid = shape.grid, batch.threads = shape.threads;
    }

    void compare_encoded(const std::vector<Encoded>& parts, const Exactly& payload,
                         const Exactly& found, size_t nbytes) {
        cuda::HostBatch device(codec_, element_);
        shape(device);
        for (const Encoded& part : parts) {
            const auto more = static_cast<uint32_t>(codec_ == Codec::kR32 ? 0 : below(3));
            device.add(part.raw, part.raw_bytes, part.grid, device_known_.get(), heads_first_,
                       part.position, more);
        }
        device.encode(found.at.get());
        for (size_t i = 0; i < parts.size(); i++) {
            const cuda::Result& result = device.results()[i];
            if ((result.kept != 0) != (parts[i].codec == Codec::kRaw) ||
                result.bytes != parts[i].bytes) {
                fail("a part is encoded to another size");
            }
            encoded += result.kept == 0;
        }
        if (std::memcmp(payload.at.get(), found.at.get(), nbytes) != 0) {
            fail("parts are encoded to other bytes");
        }
    }

    // Returns how many were refused.
    size_t compare_decoded(const std::vector<Text>& texts) {
        cuda::HostBatch device(codec_, element_);
        shape(device);
        std::vector<Exactly> copies, backs;
        for (const Text& text : texts) {
            const Exactly& copy = copies.emplace_back(text.bytes.size() + 1);
            if (!text.bytes.empty()) {
                std::memcpy(copy.at.get() + 1, text.bytes.data(), text.bytes.size());
            }
            const Exactly& back = backs.emplace_back(text.raw_bytes);
            device.add(copy.at.get() + 1, text.bytes.size(), back.at.get(), text.raw_bytes,
                       device_known_.get(), heads_first_, text.kept,
                       static_cast<uint32_t>(below(10)));
        }
        device.decode();
        size_t bad = 0;
        for (size_t i = 0; i < texts.size(); i++) {
            const Exactly wanted(texts[i].raw_bytes);
            const Decoded part = {copies[i].at.get() + 1,
                                  texts[i].bytes.size(),
                                  texts[i].kept ? Codec::kRaw : codec_,
                                  wanted.at.get(),
                                  wanted.size,
                                  device_known_ == nullptr ? nullptr : made_.get(),
                                  heads_first_};
            const bool sound = decode(element_, {&part, 1}) == 1;
            if (sound != (device.results()[i].bad == 0)) {
                fail("a damaged part is refused, and not by the processor, or the other way round");
            }
            if (sound && std::memcmp(wanted.at.get(), backs[i].at.get(), wanted.size) != 0) {
                fail("a part is decoded to other bytes");
            }
            bad += !sound;
        }
        return bad;
    }

    Codec codec_;
    Element element_ = Element::kBf16;
    bool heads_first_ = false;
};

class Others : OddParts {
 public:
    explicit Others(uint64_t seed) : OddParts(seed) {}

    // Blocks of several pieces, into slots and back.
    void copy_blocks() {
        const size_t blocks = 1 + below(5), unit = size_t{1} << below(5);
        std::vector<Piece> pieces;
        size_t block = 0;
        for (size_t i = 1 + below(4); i != 0; i--) {
            const size_t nbytes = unit * (1 + below(60));
            pieces.push_back({0, nbytes + unit * below(3), block, nbytes});
            block += nbytes;
        }
        size_t size = 0;
        for (Piece& piece : pieces) piece.base = size, size += blocks * piece.stride;
        const Exactly pages(size), slots(blocks * block), back(size);
        fill(pages, 1, 1);
        std::memset(back.at.get(), 0, size);
        std::vector<u64> places;
        std::vector<u32> ids;
        for (size_t i = 0; i < blocks; i++) {
            places.push_back(reinterpret_cast<u64>(slots.at.get()) + i * block);
            ids.push_back(static_cast<u32>(i));
        }
        std::shuffle(ids.begin(), ids.end(), chance_);
        const Shape& shape = kShapes[below(std::size(kShapes))];
        for (const bool inwards : {true, false}) {
            std::vector<Piece> table = pieces;
            const Exactly& at = inwards ? pages : back;
            for (Piece& piece : table) piece.base += reinterpret_cast<u64>(at.at.get());
            run_on_host(shape.grid, shape.threads, kvtier_copy_blocks, table.data(),
                        static_cast<u32>(table.size()), places.data(), ids.data(),
                        static_cast<u32>(blocks), u32{inwards});
        }
        for (const Piece& piece : pieces) {
            for (size_t i = 0; i < blocks; i++) {
                const size_t at = piece.base + i * piece.stride;
                if (std::memcmp(pages.at.get() + at, back.at.get() + at, piece.bytes) != 0) {
                    fail("a block comes back as something else");
                }
            }
        }
    }

    void digest_ranges() {
        const Exactly text(6'000 + below(9'000));
        for (size_t i = 0; i < text.size; i++) text.at[i] = static_cast<uint8_t>(chance_());
        std::vector<cuda::digest::Range> ranges;
        for (size_t i = 0; i < 12; i++) {
            const size_t first = below(text.size), most = i % 3 == 0 ? 300 : text.size;
            const size_t nbytes = std::min(below(most), text.size - first);
            ranges.push_back({reinterpret_cast<uint64_t>(text.at.get()) + first, nbytes, 0});
        }
        // Two warps or more add up the runs of some ranges.
        std::vector<cuda::digest::Unit> units;
        std::vector<std::vector<uint64_t>> sums;
        for (uint32_t i = 0; i < ranges.size(); i++) {
            const auto runs = static_cast<uint32_t>(
                ranges[i].bytes == 0 ? 0 : (ranges[i].bytes - 1) / kStripe / kStripesPerRun);
            if (runs < 2 || below(3) == 0) continue;
            const auto split = 1 + static_cast<uint32_t>(below(runs - 1));
            units.push_back({i, 0, split});
            units.push_back({i, split, runs});
            ranges[i].sums = reinterpret_cast<uint64_t>(sums.emplace_back(8 * runs).data());
        }
        const Exactly found(ranges.size() * kDigestBytes);
        const Shape& shape = kShapes[below(std::size(kShapes))];
        run_on_host(shape.grid, shape.threads, cuda::digest::kvtier_digest_runs, ranges.data(),
                    units.data(), static_cast<uint32_t>(units.size()));
        run_on_host(shape.grid, shape.threads, cuda::digest::kvtier_digest, ranges.data(),
                    static_cast<uint32_t>(ranges.size()), found.at.get());
        for (size_t i = 0; i < ranges.size(); i++) {
            uint8_t wanted[kDigestBytes];
            xxh3_128(reinterpret_cast<const uint8_t*>(ranges[i].address), ranges[i].bytes, 0,
                     wanted);
            if (std::memcmp(wanted, found.at.get() + i * kDigestBytes, kDigestBytes) != 0) {
                fail("a range has another digest");
            }
        }
    }
};

constexpr struct {
    std::string_view name;
    Codec codec;
} kNames[] = {{"fix4", Codec::kFix4},
              {"r32", Codec::kR32},
              {"q8", Codec::kQ8},
              {"q4", Codec::kQ4},
              {"q2", Codec::kQ2},
              {"fp8", Codec::kFp8},
              {"e5m2", Codec::kE5m2},
              {"nvfp4", Codec::kNvfp4},
              {"mxfp4", Codec::kMxfp4},
              {"ecsq", Codec::kEcsq},
              {"cachegen", Codec::kCachegen}};

}  // namespace

int main(int count, char** arguments) {
    if (count != 4) return 2;
    const std::string_view what = arguments[1];
    const size_t wanted = std::strtoull(arguments[2], nullptr, 10);
    const uint64_t seed = std::strtoull(arguments[3], nullptr, 10);
    lanes::seed(seed);
    Others others(seed);
    for (size_t i = 0; what == "copies" && i < wanted; i++) others.copy_blocks();
    for (size_t i = 0; what == "digests" && i < wanted; i++) others.digest_ranges();
    for (const auto& [name, codec] : kNames) {
        if (name != what) continue;
        Codecs codecs(codec, seed);
        for (size_t i = 0; codecs.damaged < wanted; i++) {
            const auto element = static_cast<Element>(i % kElements);
            const bool large = i == 0 || (wanted >= 1000 && i < kElements);
            codecs.round(element, large, large ? 2 : 8);
        }
        std::printf("%zu encoded, %zu damaged, %zu refused\n", codecs.encoded, codecs.damaged,
                    codecs.refused);
    }
}
