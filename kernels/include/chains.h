// What policies share that never name a block before those that follow it: what hangs on what, and
// lists of those that nothing hangs on. 12 bytes a block, and 16 more for each in a list.
#pragma once
#include <cstring>

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
    void hinted(std::span<const Id>, double) override {}
    std::vector<Id> victims(std::size_t n) const override;
    std::size_t size() const override { return size_; }
    std::size_t memory_bytes() const override;

 protected:
    using List = std::uint32_t;
    static constexpr List last_to_first = 0;  // of those that were demoted
    static constexpr std::uint32_t nowhere = 0, here = 1, read = 2, away = 3;
    static constexpr unsigned stamp_bits = 19;  // ticks

    // What is known of a block.
    struct About {
        std::uint32_t where : 2;   // `read` while it is held
        std::uint32_t listed : 1;  // nothing hangs on it, and it may go
        std::uint32_t demoted : 1;
        std::uint32_t stamp : stamp_bits;  // when it was wanted last
        std::uint32_t own : 9;             // the policy's
    };
    static_assert(sizeof(About) == 4);

    explicit Chains(List lists);

    // What a policy makes of it: a block comes, for the first time or `again`; is used; something
    // new hangs on it; goes. `last` of its batch.
    virtual void began(std::size_t) {}  // so many blocks of a request are told of now
    virtual void met(Id id, Name name, bool again, std::size_t batch, bool last) = 0;
    virtual void used(Id id, Name name, bool last) = 0;
    virtual void continued(Id) {}
    // The list that it belongs to; and a number that is higher for lists that go later.
    virtual List list_of(Id id) const = 0;
    virtual std::uint64_t rank(List list) const = 0;

    // Ticks since it was wanted last.
    std::uint64_t age(Id id) const { return (ticks_ - abouts_[id].stamp) & stamp_mask; }
    bool knows(Id id) const { return abouts_.reaches(id) && abouts_[id].where != nowhere; }
    bool in_memory(Id id) const {
        return abouts_.reaches(id) && (abouts_[id].where == here || abouts_[id].where == read);
    }
    About& about(Id id) { return abouts_[id]; }
    const About& about(Id id) const { return abouts_[id]; }
    bool empty(List list) const { return links_[list].next == list; }
    void splice(List from, List to);  // to the cold end of the other
    void relist(Id id);               // to the hot end of its list, if it may go
    std::uint64_t ticks_ = 0;         // by which blocks are stamped
    Id parent_of(Id id) const { return nodes_[id].parent; }
    std::size_t in_memory() const { return in_memory_; }

 private:
    static constexpr std::uint64_t stamp_mask = (1U << stamp_bits) - 1;

    std::uint32_t tick() const { return static_cast<std::uint32_t>(ticks_ & stamp_mask); }

    struct Node {
        Id parent;
        std::uint32_t below;  // how many in memory hang on it; of a listed one its link
    };
    struct Link {
        std::uint32_t prev, next;
        Id id;
    };

    void unlist(Id id);
    void insert(Id id, List list, bool hot);
    void list(Id id, bool hot);
    void let_go_of(Id parent);
    void leave(std::span<const Id> ids, std::uint32_t to);
    bool may_go(Id id) const { return abouts_[id].where == here; }

    List lists_;
    Chunks<Node> nodes_;
    Chunks<About> abouts_;
    Chunks<Link> links_;                          // the first ones are the lists' ends
    mutable std::vector<std::uint64_t> perhaps_;  // a bit for each list that may not be empty
    std::uint32_t spare_ = 0, made_ = 0;
    Id limit_ = 0;
    std::size_t size_ = 0, in_memory_ = 0, listed_ = 0;
};

}  // namespace kvtier
