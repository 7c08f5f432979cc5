// What the classic policies share: blocks in queues, and the names of those that left.
#pragma once
#include <deque>
#include <unordered_map>

#include "chunks.h"
#include "policy.h"

namespace kvtier {

// Names in the order in which they came, each once, and how often each was wanted.
class Ghosts {
 public:
    void add(Name name, unsigned times = 1);
    unsigned take(Name name);  // 0 where it is not there
    void halve();
    void trim(std::size_t most);  // the oldest go
    std::size_t size() const { return turns_.size(); }
    std::size_t memory_bytes() const { return turns_.size() * 56 + order_.size() * 16; }

 private:
    std::unordered_map<Name, std::pair<std::uint64_t, unsigned>> turns_;
    std::deque<std::pair<Name, std::uint64_t>> order_;  // some were taken since
    std::uint64_t turn_ = 0;
};

// Blocks in queues, by recency or by arrival; 24 bytes a block.
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
        Id prev, next;  // towards the cold end, towards the hot end
        Name name;
        std::uint32_t here : 1, held : 1, demoted : 1, queue : 13;
        std::uint32_t times : 16;
    };

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

    std::vector<Block> ends_;
    std::vector<std::size_t> lengths_;
    Chunks<Block> blocks_;
    std::size_t size_ = 0, in_memory_ = 0;
};

}  // namespace kvtier
