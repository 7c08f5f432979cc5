// Which order of blocks hits most: a small cache for each of them, of a sample of all names.
//
// A sample of single blocks will do: each order keeps a block as long as the next of the sample
// behind it in its chain, so that a block that is there can be reached. At most some 16,000 names,
// 400 kB. What a request wants is weighed before anything goes for it.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvtier {

// What could be chosen otherwise; docs/decisions/0016 says how much each matters.
struct Constants {
    double to_leave = 1, back = 0.7;  // standard deviations: for another order, for the first
    double fading = 0.98;             // of what was hit, a judgement: half in four fillings
    double judgements = 8;            // while the caches are filled once, at most
    double few = 20;                  // runs that weigh as much as their relatives
    std::uint64_t memory = 1U << 17;  // what was seen so many blocks ago counts 1/e, at most
    std::uint64_t more_seen = 8;      // of what was seen, one of so many more is news
};

class Duel {
 public:
    static constexpr unsigned orders = 3;
    struct Entry {
        std::uint32_t name, before;  // the last of the sample before it in its chain, or 0
        std::uint32_t at, turn;      // when it was used last, in quarters, and as which
        std::uint8_t kind, in;       // a bit for each cache that has it
    };
    // Lower for what goes sooner; of equals the one that was used longest ago does.
    using Rank = std::function<std::uint32_t(unsigned order, const Entry& entry)>;

    Duel(Rank rank, const Constants& constants);
    // A request used a block; the tier holds so many. Of a batch the last of its chain is the
    // `first` that is told of, and the others follow from there to its head.
    void used(std::uint32_t name, std::uint32_t quarters, unsigned kind, std::size_t held,
              bool first) {
        if (first) start_batch(name, held);
        if (samples(name)) note(name, quarters, kind);
    }
    // This batch hangs on one of those before it, whose last block has this name.
    void joined(std::uint32_t last) { joined_ = last; }
    void corrected(std::uint32_t name, unsigned kind);
    unsigned best() const { return best_; }
    std::size_t memory_bytes() const;

 private:
    static constexpr std::size_t slots = 1U << 15;
    static constexpr unsigned pairs = orders * (orders - 1) / 2;

    struct Batch {
        std::uint32_t last, tail, length;  // its last name; of the sample the last, and how many
    };

    bool samples(std::uint32_t name) const { return std::uint64_t{name} >> (32 - shift_) == 0; }
    void start_batch(std::uint32_t name, std::size_t held);
    void note(std::uint32_t name, std::uint32_t quarters, unsigned kind);
    std::size_t find(std::uint32_t name) const;
    Entry* entry_of(std::uint32_t name);
    void end_batch();
    void join();
    void index();
    void thin();
    void trim_all();
    void trim(unsigned order, std::size_t room);
    void judge();

    Rank rank_;
    Constants constants_;
    std::vector<Entry> entries_;
    std::vector<std::uint16_t> index_;  // 1 + where
    unsigned shift_ = 0;                // of 2^this names one is in the sample
    std::uint32_t turn_ = 0;
    std::uint32_t head_ = 0, joined_ = 0;
    Batch batch_{};
    std::array<Batch, 64> batches_{};  // lately
    std::size_t batches_at_ = 0;
    std::size_t unjudged_ = 0, unjudged_batches_ = 0, room_ = 1;
    std::array<std::size_t, orders> inside_{};
    std::array<double, orders> hits_{}, of_request_{};
    std::array<double, pairs> variance_{};
    unsigned best_ = 0;
};

}  // namespace kvtier
