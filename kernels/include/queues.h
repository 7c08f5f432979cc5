// The common part of the classic policies: blocks in queues, and the names of evicted blocks.
#pragma once
#include <algorithm>
#include <optional>

#include "chunks.h"
#include "policy.h"

namespace kvtier {

// Unique short names in the order of their insertion, each with a note. A name takes 17 bytes, 21
// with notes.
//
// No call works on all names: the table grows by one bucket at a time (W. Litwin, "Linear hashing:
// a new tool for file and table addressing", VLDB 1980).
class Ghosts {
 public:
    Ghosts();
    void add(std::uint32_t name, std::uint32_t note = 0);
    std::optional<std::uint32_t> take(std::uint32_t name);  // removes the name and returns its note
    void trim(std::size_t most);                            // removes the oldest
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const;

 private:
    struct Node {
        // the short name; the next node of the bucket or of the free list
        std::uint32_t name, after;
        std::uint32_t older, newer;  // node 0 is both ends of this list
    };

    std::uint32_t& bucket_of(std::uint32_t name);
    void grow();
    void remove(std::uint32_t node);

    Chunks<Node> nodes_;
    Chunks<std::uint32_t> buckets_, notes_;
    std::size_t size_ = 0, split_ = 1;  // the number of buckets
    std::uint32_t spare_ = 0, made_ = 1;
};

// Blocks in queues, ordered by recency or by arrival; 16 bytes per block.
class Queues : public Policy {
 public:
    void added(std::span<const Id> ids, std::span<const Name> names,
               std::span<const Id> parents) override;
    void wanted(std::span<const Id> ids, std::span<const Name> names) override;
    void refreshed(std::span<const Id> ids) override;
    void held(std::span<const Id> ids) override;
    void freed(std::span<const Id> ids) override;
    void left(std::span<const Id> ids) override { leave(ids); }
    void gone(std::span<const Id> ids) override { leave(ids); }
    void demoted(std::span<const Id> ids) override;
    void hinted(std::span<const Id>, std::span<const Name>, double) override {}
    std::size_t size() const override { return size_; }
    std::size_t memory_bytes() const override {
        return blocks_.memory_bytes() + ends_.capacity() * sizeof(Block);
    }

 protected:
    using Queue = std::uint32_t;
    static constexpr Queue demoted_queue = 0;

    struct Block {
        Id prev, next;       // towards the cold end, towards the hot end
        std::uint32_t name;  // the short name
        std::uint32_t present : 1, held : 1, demoted : 1, times : 2;
        std::uint32_t queue : 8;
        std::uint32_t folds : 19;  // the number of folds at which `queue` was set
    };
    static_assert(sizeof(Block) == 16);

    explicit Queues(Queue queues);
    // The queue for a new block, and for a block that was used.
    virtual Queue queue_for_new(Block& block) = 0;
    virtual Queue queue_for_used(Block& block) = 0;
    virtual bool by_recency() const { return true; }
    virtual void on_leaving(Id) {}  // before it leaves its queue, if it may be evicted
    virtual void on_left(const Block&) {}

    bool present(Id id) const {
        return id < max_records && blocks_.reaches(id) && blocks_[id].present;
    }
    Block& block(Id id) { return blocks_[id]; }
    const Block& block(Id id) const { return blocks_[id]; }
    // The ends of queues have their own ids.
    Id coldest(Queue queue) const { return ends_[queue].next; }
    Id next(Id id) const { return at(id).next; }
    static bool is_end(Id id) { return id >= ends_from; }
    // Appends each queue q >= 2 to the hot end of queue q / 2, in this order.
    void fold();
    Queue queue_of(const Block& one) const {
        const std::uint32_t folds = (folds_ - one.folds) & folds_mask;
        return one.queue < 2 ? one.queue : std::max<Queue>(1, one.queue >> std::min(folds, 8U));
    }
    std::uint32_t folds() const { return folds_; }
    void settle(Block& one, Queue queue) {
        one.queue = queue & 255;
        one.folds = folds_ & folds_mask;
    }
    void push(Id id, bool hot);
    void take(Id id);
    std::size_t length(Queue queue) const { return lengths_[queue]; }
    void append(std::vector<Id>& named, Queue queue, std::size_t n) const;
    std::size_t in_memory() const { return in_memory_; }

 private:
    static constexpr Id ends_from = 0x80000000;
    Block& at(Id id) { return is_end(id) ? ends_[id - ends_from] : blocks_[id]; }
    const Block& at(Id id) const { return is_end(id) ? ends_[id - ends_from] : blocks_[id]; }
    void leave(std::span<const Id> ids);
    void move(Id id, Queue to);

    static constexpr std::uint32_t folds_mask = (1U << 19) - 1;

    std::vector<Block> ends_;
    std::vector<std::size_t> lengths_;
    Chunks<Block> blocks_;
    std::size_t size_ = 0, in_memory_ = 0;
    std::uint32_t folds_ = 0;
};

}  // namespace kvtier
