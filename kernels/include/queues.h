// What the classic policies share: blocks in queues, and the names of those that left.
#pragma once
#include <algorithm>
#include <optional>

#include "chunks.h"
#include "policy.h"

namespace kvtier {

// Short names in the order in which they came, each once, with a note; 17 bytes each, 21 with
// notes.
//
// No call does work for all of them: the table grows by a bucket at a time (W. Litwin, "Linear
// hashing: a new tool for file and table addressing", VLDB 1980).
class Ghosts {
 public:
    Ghosts();
    void add(std::uint32_t name, std::uint32_t note = 0);
    std::optional<std::uint32_t> take(std::uint32_t name);  // its note, and it is there no more
    void trim(std::size_t most);                            // the oldest go
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const;

 private:
    struct Node {
        std::uint32_t name, after;   // the short name, the next of its bucket or of those unused
        std::uint32_t older, newer;  // node 0 is the end of both
    };

    std::uint32_t& bucket_of(std::uint32_t name);
    void grow();
    void remove(std::uint32_t node);

    Chunks<Node> nodes_;
    Chunks<std::uint32_t> buckets_, notes_;
    std::size_t size_ = 0, split_ = 1;  // as many buckets
    std::uint32_t spare_ = 0, made_ = 1;
};

// Blocks in queues, by recency or by arrival; 16 bytes a block.
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
    void hinted(std::span<const Id>, double) override {}
    std::size_t size() const override { return size_; }
    std::size_t memory_bytes() const override {
        return blocks_.memory_bytes() + ends_.capacity() * sizeof(Block);
    }

 protected:
    using Queue = std::uint32_t;
    static constexpr Queue demoted_queue = 0;

    struct Block {
        Id prev, next;       // towards the cold end, towards the hot end
        std::uint32_t name;  // the short one
        std::uint32_t here : 1, held : 1, demoted : 1, times : 2;
        std::uint32_t queue : 8;
        std::uint32_t folds : 19;  // the queue is as of so many
    };
    static_assert(sizeof(Block) == 16);

    explicit Queues(Queue queues);
    // Where a block goes that came, that was used.
    virtual Queue met(Block& block) = 0;
    virtual Queue used(Block& block) = 0;
    virtual bool by_recency() const { return true; }
    virtual void leaving(Id) {}  // it is in its queue yet, if it may go
    virtual void left_it(const Block&) {}

    bool here(Id id) const { return id < max_records && blocks_.reaches(id) && blocks_[id].here; }
    Block& block(Id id) { return blocks_[id]; }
    const Block& block(Id id) const { return blocks_[id]; }
    // Ends of queues have ids of their own.
    Id coldest(Queue queue) const { return ends_[queue].next; }
    Id next(Id id) const { return at(id).next; }
    static bool is_end(Id id) { return id >= ends_from; }
    // Each queue from 2 on to the hot end of that of half its number, in this order.
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
