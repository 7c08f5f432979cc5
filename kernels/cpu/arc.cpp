// Adaptive replacement: blocks used once and blocks used more often; the ghosts of both decide
// which of them gets more room. The policy's size is the number of blocks in memory.
#include <algorithm>

#include "policies.h"
#include "queues.h"

namespace kvtier {

namespace {

constexpr std::size_t few = 1U << 16;

// As many ghosts as blocks; in large tiers half as many: a ghost costs as much memory as a block.
std::size_t half_of_many(std::size_t blocks) { return std::max(std::min(blocks, few), blocks / 2); }

class Arc final : public Queues {
 public:
    Arc() : Queues(3) {}
    std::vector<Id> victims(std::size_t n) const override {
        std::vector<Id> named;
        append(named, demoted_queue, n);
        Id first = coldest(once), second = coldest(often);
        std::size_t left = length(once);
        while (named.size() < n && !(is_end(first) && is_end(second))) {
            const bool from_once =
                !is_end(first) && (static_cast<double>(left) > room_ || is_end(second));
            Id& id = from_once ? first : second;
            named.push_back(id);
            id = next(id);
            left -= from_once;
        }
        return named;
    }
    std::size_t memory_bytes() const override {
        return Queues::memory_bytes() + once_.memory_bytes() + often_.memory_bytes();
    }

 private:
    static constexpr Queue once = 1, often = 2;
    Queue queue_for_new(Block& block) override {
        const auto had_once = static_cast<double>(once_.size()),
                   had_often = static_cast<double>(often_.size());
        Queue queue = once;
        if (once_.take(block.name)) {
            room_ = std::min(room_ + std::max(1.0, had_often / had_once),
                             static_cast<double>(in_memory() + 1));
            queue = often;
        } else if (often_.take(block.name)) {
            room_ = std::max(room_ - std::max(1.0, had_once / had_often), 0.0);
            queue = often;
        }
        return queue;
    }
    Queue queue_for_used(Block&) override { return often; }
    void on_left(const Block& block) override {
        (block.queue == once ? once_ : often_).add(block.name);
        const std::size_t all = half_of_many(in_memory() + 1);
        once_.trim(all);
        often_.trim(all);
    }
    Ghosts once_, often_;
    double room_ = 0;  // of the queue of blocks used once
};

}  // namespace

std::unique_ptr<Policy> make_arc() { return std::make_unique<Arc>(); }

}  // namespace kvtier
