// The classics: by how often, adaptively by both recency and frequency, and by queues alone.
#pragma once
#include "queues.h"

namespace kvtier {

// Least frequently used, the least recent of them first. What left is remembered for a while, and
// all counts are halved from time to time: a block's is the number of its queue.
class Lfu final : public Queues {
 public:
    Lfu() : Queues(1 + most_times) {}
    std::vector<Id> victims(std::size_t n) const override;
    std::size_t memory_bytes() const override {
        return Queues::memory_bytes() + ghosts_.memory_bytes();
    }

 private:
    static constexpr unsigned most_times = 255;
    Queue met(Block& block) override;
    Queue used(Block& block) override { return count(queue_of(block) + 1); }
    void left_it(const Block& block) override;
    Queue count(unsigned times);
    Ghosts ghosts_;         // their notes are how often, and after how many folds
    std::size_t uses_ = 0;  // since the last fold
};

// Adaptive replacement: seen once, and more often; their ghosts say which deserves more room.
class Arc final : public Queues {
 public:
    Arc() : Queues(3) {}
    std::vector<Id> victims(std::size_t n) const override;
    std::size_t memory_bytes() const override {
        return Queues::memory_bytes() + once_.memory_bytes() + often_.memory_bytes();
    }

 private:
    static constexpr Queue once = 1, often = 2;
    Queue met(Block& block) override;
    Queue used(Block&) override { return often; }
    void left_it(const Block& block) override;
    Ghosts once_, often_;
    double room_ = 0;  // for those seen once
};

// S3-FIFO: a small queue that most leave soon, a main one, and ghosts of the small one.
class S3Fifo final : public Queues {
 public:
    S3Fifo() : Queues(3) {}
    std::vector<Id> victims(std::size_t n) const override;
    std::size_t memory_bytes() const override {
        return Queues::memory_bytes() + ghosts_.memory_bytes();
    }

 private:
    static constexpr Queue small = 1, main = 2;
    static constexpr unsigned most_times = 3;
    Queue met(Block& block) override;
    Queue used(Block& block) override;
    bool by_recency() const override { return false; }
    void leaving(Id id) override;
    void left_it(const Block& block) override;
    Ghosts ghosts_;
};

}  // namespace kvtier
