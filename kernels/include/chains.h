// The common part of the policies that never evict a block before those that follow it: chains, and
// lists of blocks without followers. 12 bytes per block, and 16 more per block in a list.
#pragma once

#include "chunks.h"
#include "policy.h"

namespace kvtier {

class Chains : public Policy {
 public:
    void added(std::span<const Id> ids, std::span<const Name> names,
               std::span<const Id> parents) override;
    void wanted(std::span<const Id> ids, std::span<const Name> names) override;
    void refreshed(std::span<const Id> ids) override;
    void held(std::span<const Id> ids) override;
    void freed(std::span<const Id> ids) override;
    void left(std::span<const Id> ids) override { leave(ids, away); }
    void gone(std::span<const Id> ids) override { leave(ids, nowhere); }
    void demoted(std::span<const Id> ids) override;
    void hinted(std::span<const Id>, std::span<const Name>, double) override {}
    std::vector<Id> victims(std::size_t n) const override;
    std::size_t size() const override { return size_; }
    std::size_t memory_bytes() const override;

 protected:
    using List = std::uint32_t;
    static constexpr List demoted_list = 0;  // list of demoted blocks
    static constexpr std::uint32_t nowhere = 0, here = 1, read = 2, away = 3;
    static constexpr unsigned stamp_bits = 19;  // ticks

    // The state of a block.
    struct BlockState {
        std::uint32_t where : 2;   // `read` while it is held
        std::uint32_t listed : 1;  // evictable, and no block in memory follows it
        std::uint32_t demoted : 1;
        std::uint32_t stamp : stamp_bits;  // the tick of its last use
        std::uint32_t own : 9;             // bits of the policy
    };
    static_assert(sizeof(BlockState) == 4);

    explicit Chains(List lists);

    // Implemented by a policy: a block was added, for the first time or `again`; was used; got a
    // follower. `last` of its batch.
    virtual void on_batch(std::size_t) {}  // a report about this many blocks of a request begins
    virtual void on_added(Id id, Name name, bool again, std::size_t batch, bool last) = 0;
    virtual void used(Id id, Name name, bool last) = 0;
    // A request used the blocks that are in memory: calls `used` for each, the last one first.
    virtual void on_batch_used(std::span<const Id> ids, std::span<const Name> names);
    virtual void on_continued(Id) {}
    // The list of a block; and its rank: lists with higher ranks are evicted later.
    virtual List list_of(Id id) const = 0;
    virtual std::uint64_t rank(List list) const = 0;

    // Ticks since its last use.
    std::uint64_t age(Id id) const { return (ticks_ - states_[id].stamp) & stamp_mask; }
    bool is_known(Id id) const { return states_.reaches(id) && states_[id].where != nowhere; }
    bool in_memory(Id id) const {
        return states_.reaches(id) && (states_[id].where == here || states_[id].where == read);
    }
    BlockState& state_of(Id id) { return states_[id]; }
    const BlockState& state_of(Id id) const { return states_[id]; }
    bool empty(List list) const { return links_[list].next == list; }
    void splice(List from, List to);  // to the cold end of `to`
    void relist(Id id);               // to the hot end of its list, if it may be evicted
    std::uint64_t ticks_ = 0;         // the time stamps of blocks
    Id parent_of(Id id) const { return nodes_[id].parent; }
    std::size_t in_memory() const { return in_memory_; }

 private:
    static constexpr std::uint64_t stamp_mask = (1U << stamp_bits) - 1;

    std::uint32_t tick() const { return static_cast<std::uint32_t>(ticks_ & stamp_mask); }

    struct Node {
        Id parent;
        std::uint32_t below;  // number of followers in memory; for a listed block its link
    };
    struct Link {
        std::uint32_t prev, next;
        Id id;
    };

    void unlist(Id id);
    void insert(Id id, List list, bool hot);
    void list(Id id, bool hot);
    void remove_follower(Id parent);
    void leave(std::span<const Id> ids, std::uint32_t to);
    bool is_evictable(Id id) const { return states_[id].where == here; }

    Chunks<Node> nodes_;
    Chunks<BlockState> states_;
    Chunks<Link> links_;                           // the first ones are the ends of the lists
    mutable std::vector<std::uint64_t> nonempty_;  // a bit per list, 0 if the list is empty
    std::uint32_t spare_ = 0, made_ = 0;
    Id limit_ = 0;
    std::size_t size_ = 0, in_memory_ = 0, listed_ = 0;
};

}  // namespace kvtier
