// Least frequently used; among equals, least recently used. Evicted names are remembered for a
// while, and all counts are halved periodically: the count of a block is the number of its queue.
// The policy has no fixed size: its size is the number of blocks in memory.
#include <algorithm>

#include "policies.h"
#include "queues.h"

namespace kvtier {

namespace {

constexpr unsigned times_bits = 8;
constexpr std::size_t few_ghosts = 1U << 16, few_uses = 8192, uses_of_each = 32;

class Lfu final : public Queues {
 public:
    Lfu() : Queues(1 + most_times) {}
    std::vector<Id> victims(std::size_t n) const override {
        std::vector<Id> named;
        for (Queue queue = demoted_queue; queue <= most_times; ++queue) append(named, queue, n);
        return named;
    }
    std::size_t memory_bytes() const override {
        return Queues::memory_bytes() + ghosts_.memory_bytes();
    }

 private:
    static constexpr unsigned most_times = 255;
    Queue queue_for_new(Block& block) override {
        const std::uint32_t note = ghosts_.take(block.name).value_or(0);
        const std::uint32_t since = ((folds() << times_bits) + most_times - note) >> times_bits;
        return count(1 + ((note & most_times) >> std::min(since, times_bits)));
    }
    Queue queue_for_used(Block& block) override { return count(queue_of(block) + 1); }
    void on_left(const Block& block) override {
        ghosts_.add(block.name, folds() << times_bits | queue_of(block));
        ghosts_.trim(std::max(few_ghosts, in_memory() / 2));
        if (uses_ < uses_of_each * std::max(in_memory(), few_uses)) return;
        uses_ = 0;
        fold();
    }
    Queue count(unsigned times) {
        ++uses_;
        return std::min(times, most_times);
    }
    Ghosts ghosts_;         // their notes are the count and the folds at that time
    std::size_t uses_ = 0;  // since the last fold
};

}  // namespace

std::unique_ptr<Policy> make_lfu() { return std::make_unique<Lfu>(); }

}  // namespace kvtier
