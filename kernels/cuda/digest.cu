// XXH3-128 of ranges of the device's memory, bit for bit as frames store it (docs/formats.md): a
// warp per range. Four stripes are read at a time, eight lanes for each. What the 16 stripes of a
// run add to the accumulators does not depend on them: all of a run's words are in flight together,
// and many warps add up the runs of a long range before its own warp takes the sums in order.

#include "addresses.h"
#include "codec/digest.h"
#include "lanes.h"

namespace kvtier::cuda::digest {

// At any address. `sums`: the address of memory for the sums of its runs, aligned to 8 bytes, or 0.
struct Range {
    uint64_t address, bytes, sums;
};
static_assert(sizeof(Range) == 24);

// Runs of a range that one warp adds up.
struct Unit {
    uint32_t range, first, end;
};

namespace {

constexpr uint32_t kWarp = static_cast<uint32_t>(kLanes);
constexpr uint32_t kWords = 8;  // of a stripe, each with its accumulator
constexpr uint32_t kAtOnce = kWarp / kWords;
constexpr uint32_t kRun = static_cast<uint32_t>(kStripesPerRun);
constexpr uint32_t kSteps = kRun / kAtOnce;

alignas(8) __device__ const uint8_t kSecret[kSecretBytes] = KVTIER_XXH3_SECRET;
__device__ const uint64_t kStarts[kWords] = KVTIER_XXH3_STARTS;

// The word at any address that the range contains. Reads aligned words, but no byte outside of the
// range; with `kInside`, the aligned words are inside.
template <bool kInside>
KVTIER_DEVICE uint64_t word_at(const Range& range, uint64_t address) {
    const uint32_t skew = address % 8, bits = 8 * skew;
    const uint64_t low = address - skew, high = skew == 0 ? low : low + 8;
    if (!kInside && (low < range.address || high + 8 > range.address + range.bytes)) {
        return xxh3::read64(at<const uint8_t>(address));
    }
    const uint64_t one = load<uint64_t>(at<const uint8_t>(low));
    const uint64_t other = load<uint64_t>(at<const uint8_t>(high));
    return one >> bits | other << 1 << (63 - bits);
}

// A range without whole stripes. Not inlined: it would need as many registers as all else.
__device__ __attribute__((noinline)) void digest_short(const Range& range, uint8_t* digest) {
    const uint8_t* const in = at<const uint8_t>(range.address);
    xxh3::write_digest(range.bytes <= 16 ? xxh3::up_to_16(in, range.bytes, 0, kSecret)
                                         : xxh3::up_to_240(in, range.bytes, 0, kSecret),
                       digest);
}

// The keys of a run's words, and what they add to the accumulators: each lane's sum modulo 8.
class Keys {
 public:
    KVTIER_DEVICE Keys() {
        each([&](uint32_t lane) {
            for (uint32_t step = 0; step < kSteps; step++) {
                of_[step][lane] = key(8 * (step * kAtOnce + lane / kWords + lane % kWords));
            }
        });
    }

    // Of up to 16 stripes. `kInside`: 16 whole stripes, and eight bytes on both sides, are inside.
    template <bool kInside>
    KVTIER_DEVICE Each<uint64_t> added(const Range& range, uint64_t address, uint32_t stripes) {
        Each<uint64_t> words[kSteps];
        const auto has = [&](uint32_t step, uint32_t lane) {
            return kInside || step * kAtOnce + lane / kWords < stripes;
        };
        each([&](uint32_t lane) {
            for (uint32_t step = 0; step < kSteps; step++) {
                if (!has(step, lane)) continue;
                words[step][lane] =
                    word_at<kInside>(range, address + step * kAtOnce * kStripe + lane * 8);
            }
        });
        Each<uint64_t> sums, products;
        each([&](uint32_t lane) {
            sums[lane] = 0, products[lane] = 0;
            for (uint32_t step = 0; step < kSteps; step++) {
                if (!has(step, lane)) continue;
                sums[lane] += words[step][lane];
                products[lane] += xxh3::keyed_product(words[step][lane], of_[step][lane]);
            }
        });
        return together(sums, products);
    }

    // A word is added to the accumulator next to its own.
    KVTIER_DEVICE static Each<uint64_t> together(Each<uint64_t>& sums, Each<uint64_t>& products) {
        Each<uint64_t> found = crossed(sums, 1);
        each([&](uint32_t lane) { found[lane] += products[lane]; });
        for (uint32_t apart = kWords; apart < kWarp; apart *= 2) {
            Each<uint64_t> other = crossed(found, apart);
            each([&](uint32_t lane) { found[lane] += other[lane]; });
        }
        return found;
    }

    // The offset is a multiple of 8.
    KVTIER_DEVICE static uint64_t key(uint64_t offset) { return load<uint64_t>(kSecret + offset); }

 private:
    Each<uint64_t> of_[kSteps];
};

// Eight accumulators; each lane holds the one of its number modulo 8.
class Accumulated {
 public:
    KVTIER_DEVICE explicit Accumulated(Keys& keys) : keys_(keys) {
        each([&](uint32_t lane) { of_[lane] = kStarts[lane % kWords]; });
    }

    // Consumes up to 16 stripes; scrambles after 16. `kInside` as for `added`.
    template <bool kInside>
    KVTIER_DEVICE void run(const Range& range, uint64_t address, uint32_t stripes) {
        Each<uint64_t> sums = keys_.added<kInside>(range, address, stripes);
        each([&](uint32_t lane) { of_[lane] += sums[lane]; });
        if (kInside || stripes == kRun) scramble();
    }

    // Consumes the first runs of a range from their sums.
    KVTIER_DEVICE void runs(const uint64_t* sums, uint64_t count) {
        Each<uint64_t> next;
        const auto fetch = [&](uint64_t first) {
            each([&](uint32_t lane) {
                const uint64_t i = first * kWords + lane;
                next[lane] = i < count * kWords ? sums[i] : 0;
            });
        };
        fetch(0);
        for (uint64_t first = 0; first < count; first += kAtOnce) {
            Each<uint64_t> now = next;
            fetch(first + kAtOnce);
            for (uint32_t k = 0; k < kAtOnce && first + k < count; k++) {
                Each<uint32_t> from;
                each([&](uint32_t lane) { from[lane] = k * kWords + lane % kWords; });
                Each<uint64_t> sum = shuffled(now, from);
                each([&](uint32_t lane) { of_[lane] += sum[lane]; });
                scramble();
            }
        }
    }

    // Consumes the last 64 bytes, some of them again, and writes the digest.
    KVTIER_DEVICE void finish(const Range& range, uint8_t* digest) {
        Each<uint64_t> sums, products;
        each([&](uint32_t lane) {
            sums[lane] = 0, products[lane] = 0;
            if (lane >= kWords) return;
            const uint64_t word =
                word_at<false>(range, range.address + range.bytes - kStripe + uint64_t{lane} * 8);
            sums[lane] = word;
            products[lane] = xxh3::keyed_product(
                word, xxh3::read64(kSecret + (kSecretBytes - kStripe - 7 + 8 * lane)));
        });
        Each<uint64_t> last = Keys::together(sums, products);
        each([&](uint32_t lane) { of_[lane] += last[lane]; });
        Each<uint64_t> next = crossed(of_, 1);
        const auto word = [&](uint64_t position, uint64_t start) {
            return xxh3::avalanche(start + sum([&](uint32_t lane) {
                                       return lane % 2 == 0 && lane < kWords
                                                  ? xxh3::mixed_pair(of_[lane], next[lane],
                                                                     kSecret + position + 8 * lane)
                                                  : uint64_t{0};
                                   }));
        };
        const xxh3::Wide found = {word(xxh3::kLowAt, xxh3::low_start(range.bytes)),
                                  word(xxh3::kHighAt, xxh3::high_start(range.bytes))};
        each([&](uint32_t lane) {
            if (lane == 0) xxh3::write_digest(found, digest);
        });
    }

 private:
    KVTIER_DEVICE void scramble() {
        each([&](uint32_t lane) {
            of_[lane] =
                xxh3::scrambled(of_[lane], Keys::key(kSecretBytes - kStripe + 8 * (lane % kWords)));
        });
    }

    Keys& keys_;
    Each<uint64_t> of_;
};

KVTIER_DEVICE uint64_t stripes_of(const Range& range) { return (range.bytes - 1) / kStripe; }

// True if the aligned words of a run are inside of the range.
KVTIER_DEVICE bool inside(uint64_t stripes, uint64_t first) {
    return first != 0 && first + kRun < stripes;
}

}  // namespace

// Writes the sums of the runs of units.
extern "C" __global__ void __launch_bounds__(128, 8)
    kvtier_digest_runs(const Range* ranges, const Unit* units, uint32_t count) {
    Keys keys;
    for (uint32_t i = warp(); i < count; i += warps()) {
        const Unit unit = units[i];
        const Range range = ranges[unit.range];
        const uint64_t stripes = stripes_of(range);
        uint64_t* const sums = at<uint64_t>(range.sums);
        for (uint32_t run = unit.first; run < unit.end; run++) {
            const uint64_t first = uint64_t{run} * kRun, here = range.address + first * kStripe;
            Each<uint64_t> found = inside(stripes, first) ? keys.added<true>(range, here, kRun)
                                                          : keys.added<false>(range, here, kRun);
            each([&](uint32_t lane) {
                if (lane < kWords) sums[uint64_t{run} * kWords + lane] = found[lane];
            });
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 8)
    kvtier_digest(const Range* ranges, uint32_t count, uint8_t* digests) {
    for (uint32_t i = warp(); i < count; i += warps()) {
        const Range range = ranges[i];
        uint8_t* const digest = digests + i * kDigestBytes;
        if (range.bytes <= kShortMost) {
            each([&](uint32_t lane) {
                if (lane == 0) digest_short(range, digest);
            });
            continue;
        }
        Keys keys;
        Accumulated all(keys);
        const uint64_t stripes = stripes_of(range);
        uint64_t first = 0;
        if (range.sums != 0) {
            all.runs(at<const uint64_t>(range.sums), stripes / kRun);
            first = stripes / kRun * kRun;
        }
        for (; first < stripes; first += kRun) {
            const uint64_t left = stripes - first, here = range.address + first * kStripe;
            if (inside(stripes, first)) {
                all.run<true>(range, here, kRun);
            } else {
                all.run<false>(range, here, left < kRun ? static_cast<uint32_t>(left) : kRun);
            }
        }
        all.finish(range, digest);
    }
}

}  // namespace kvtier::cuda::digest
