// S3-FIFO: a small queue that most blocks leave soon, a main queue, and ghosts of the small queue.
// The policy has no fixed size: its size is the number of blocks in memory.
#include <algorithm>
#include <deque>
#include <tuple>

#include "policies.h"
#include "queues.h"

namespace kvtier {

namespace {

class S3Fifo final : public Queues {
 public:
    S3Fifo() : Queues(3) {}
    // Simulates the evictions one by one: blocks that are passed over move to an end of a queue.
    std::vector<Id> victims(std::size_t n) const override {
        n = std::min(n, size());
        std::vector<Id> named;
        append(named, demoted_queue, n);
        std::size_t in_small = length(small), in_main = length(main);
        Id first = coldest(small), second = coldest(main);
        std::deque<std::pair<Id, unsigned>> again;
        while (named.size() < n) {
            if (in_small != 0 && (in_small * 10 >= in_small + in_main || in_main == 0)) {
                if (block(first).times >= 2) {
                    again.emplace_back(first, 0);
                    ++in_main;
                } else {
                    named.push_back(first);
                }
                first = next(first);
                --in_small;
                continue;
            }
            Id id = second;
            unsigned times;
            if (is_end(id)) {
                std::tie(id, times) = again.front();
                again.pop_front();
            } else {
                times = block(id).times;
                second = next(id);
            }
            if (times > 0) {
                again.emplace_back(id, times - 1);
            } else {
                named.push_back(id);
                --in_main;
            }
        }
        return named;
    }
    std::size_t memory_bytes() const override {
        return Queues::memory_bytes() + ghosts_.memory_bytes();
    }

 private:
    static constexpr Queue small = 1, main = 2;
    static constexpr unsigned most_times = 3;
    Queue queue_for_new(Block& block) override { return ghosts_.take(block.name) ? main : small; }
    Queue queue_for_used(Block& block) override {
        block.times = std::min<unsigned>(block.times + 1, most_times) & most_times;
        return block.queue;
    }
    bool by_recency() const override { return false; }
    // The blocks that were passed over pay for it when a block leaves before them.
    void on_leaving(Id id) override {
        const Block& one = block(id);
        if (one.held || one.demoted) return;
        const Queue queue = one.queue;
        for (Id passed = coldest(queue); passed != id;) {
            Block& other = block(passed);
            if (queue == small ? other.times < 2 : other.times < 1) return;
            const Id after = next(passed);
            take(passed);
            other.queue = main;
            other.times = queue == small ? 0 : other.times - 1;
            push(passed, true);
            passed = after;
        }
    }
    void on_left(const Block& block) override {
        if (block.queue == small) ghosts_.add(block.name);
        ghosts_.trim(in_memory());
    }
    Ghosts ghosts_;
};

}  // namespace

std::unique_ptr<Policy> make_s3fifo() { return std::make_unique<S3Fifo>(); }

}  // namespace kvtier
