// Selects the order with the most hits in a simulation of small caches, over a sample of names.
//
// A sample of single blocks is sufficient: each order keeps a block at least as long as the next
// sampled block behind it in its chain, so that each block in a cache can be reached. At most about
// 16,000 names, 400 kB. Hits of a request are counted before anything is evicted for it.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvtier {

// Tunable constants; docs/decisions/0016 and 0025 measure their effects.
struct Constants {
    // Lead in standard deviations to leave an order, to return to the first.
    double to_leave = 1, back = 0.7;
    double fading = 0.98;   // per judgement, of hits: half of it in four fillings
    double judgements = 8;  // at most, while the caches are filled once
    double few = 20;        // the number of runs that weigh as much as those of related kinds
    // The decay of observations: counts 1/e after this many blocks, at most.
    std::uint64_t memory = 1U << 17;
    std::uint64_t more_seen = 8;  // the growth of observations that triggers a fit: one in so many
};

class PolicySelector {
 public:
    static constexpr unsigned orders = 3;
    struct Entry {
        std::uint32_t name, before;  // the previous sampled name of its chain, or 0
        std::uint32_t at, turn;      // the last use, in quarters, and its sequence number
        std::uint16_t kind;
        std::uint8_t in;  // a bit for each cache that contains it
    };
    // Lower ranks are evicted first; among equals the least recently used.
    using Rank = std::function<std::uint32_t(unsigned order, const Entry& entry)>;

    PolicySelector(Rank rank, const Constants& constants);
    // A request used a block; the tier has `held` blocks. The last block of a batch is reported
    // `first`, and the others follow from there to the head.
    void used(std::uint32_t name, std::uint32_t quarters, unsigned kind, std::size_t held,
              bool first) {
        if (first) start_batch(name, held);
        if (samples(name)) note(name, quarters, kind);
    }
    void prefetch(std::uint32_t name) const {
        if (samples(name)) __builtin_prefetch(&index_[home(name)]);
    }
    // This batch follows an earlier one whose last block has this name.
    void follows(std::uint32_t last) { followed_ = last; }
    void corrected(std::uint32_t name, unsigned kind);
    unsigned best() const { return best_; }
    std::size_t memory_bytes() const;

 private:
    static constexpr std::size_t slots = 1U << 15, none_at = ~std::size_t{0};
    static constexpr std::size_t most_room = 1U << 12, most_entries = 4 * most_room;
    static constexpr std::uint8_t everywhere = (1U << orders) - 1;
    static constexpr unsigned pairs = orders * (orders - 1) / 2;

    struct Batch {
        // Its last name; the last sampled name, and the number of sampled names.
        std::uint32_t last, tail, length;
    };

    bool samples(std::uint32_t name) const { return std::uint64_t{name} >> (32 - shift_) == 0; }
    void start_batch(std::uint32_t name, std::size_t held);
    // Inline: a policy calls it for each block of a request.
    [[gnu::always_inline]] void note(std::uint32_t name, std::uint32_t quarters, unsigned kind) {
        const std::size_t slot = find(name);
        if (index_[slot] == 0) add_entry(slot, name);
        const std::size_t at = index_[slot] - 1U;
        Entry& entry = entries_[at];
        entry.at = quarters;
        entry.turn = turn_++;
        entry.kind = static_cast<std::uint16_t>(kind);
        if (entry.in == everywhere) {
            ++request_hits_of_all_;
        } else {
            for (unsigned order = 0; order < orders; ++order) {
                const std::uint32_t hit = entry.in >> order & 1;
                request_hits_[order] += hit;
                inside_[order] += 1 - hit;
            }
            entry.in = everywhere;
        }
        Entry* behind = head_at_ != none_at ? &entries_[head_at_] : entry_of(head_);
        if (behind != nullptr) behind->before = name;
        head_ = name;
        head_at_ = at;
        if (batch_.tail == 0) batch_.tail = name;
        ++batch_.length;
        ++unjudged_;
        if (entries_.size() == most_entries) trim_all();
    }
    void add_entry(std::size_t slot, std::uint32_t name);
    static std::size_t home(std::uint32_t name) { return name * 0x9E3779B1U >> 17; }
    std::size_t find(std::uint32_t name) const {
        std::size_t at = home(name);
        while (index_[at] != 0 && entries_[index_[at] - 1].name != name) at = (at + 1) % slots;
        return at;
    }
    Entry* entry_of(std::uint32_t name);
    void end_batch();
    void link_to_followed();
    void index();
    void thin();
    void trim_all();
    void trim(unsigned order, std::size_t room);
    void judge();

    Rank rank_;
    Constants constants_;
    std::vector<Entry> entries_;
    std::vector<std::uint16_t> index_;  // 1 + the index in entries_
    unsigned shift_ = 0;                // one in 2^this names is in the sample
    std::uint32_t turn_ = 0;
    std::uint32_t head_ = 0, followed_ = 0;
    std::size_t head_at_ = none_at;  // the index of `head_` in entries_, if known
    Batch batch_{};
    std::array<Batch, 64> batches_{};  // the latest ones
    std::size_t batches_at_ = 0;
    std::size_t unjudged_ = 0, unjudged_batches_ = 0, room_ = 1;
    std::array<std::size_t, orders> inside_{};
    std::array<double, orders> hits_{};
    std::array<std::uint32_t, orders> request_hits_{};  // hits that `hits_` does not contain yet
    std::uint32_t request_hits_of_all_ = 0;             // further ones, hits of all orders
    std::array<double, pairs> variance_{};
    unsigned best_ = 0;
};

}  // namespace kvtier
