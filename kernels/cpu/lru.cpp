// Least recently used, as one linked list of ids: 8 bytes per block. Batches are traversed from
// their end: the head of a chain is the most recent.

#include <algorithm>

#include "chunks.h"
#include "policies.h"

namespace kvtier {

namespace {

class Lru final : public Policy {
 public:
    Lru() {
        links_.reach(ends);
        links_[ends] = {ends, ends};
    }
    void added(std::span<const Id> ids, std::span<const Name>, std::span<const Id>) override {
        check_ids(ids);
        for (std::size_t i = ids.size(); i-- > 0;) {
            prefetch(ids, i);
            std::uint64_t at = std::uint64_t{ids[i]} + first;
            links_.reach(at);
            if (lists(at)) erase(at);
            insert(at, links_[ends].prev, ends);
        }
    }
    void wanted(std::span<const Id> ids, std::span<const Name>) override { refreshed(ids); }
    void refreshed(std::span<const Id> ids) override {
        for (std::size_t i = ids.size(); i-- > 0;) {
            prefetch(ids, i);
            std::uint64_t at = std::uint64_t{ids[i]} + first;
            if (!lists(at)) continue;
            erase(at);
            insert(at, links_[ends].prev, ends);
        }
    }
    void held(std::span<const Id> ids) override {
        for (std::size_t i = ids.size(); i-- > 0;) {
            prefetch(ids, i);
            std::uint64_t at = std::uint64_t{ids[i]} + first;
            if (!lists(at)) continue;
            erase(at);
            links_[at].next = aside;
        }
    }
    // Freed blocks were in use until now: they are recent.
    void freed(std::span<const Id> ids) override {
        for (std::size_t i = ids.size(); i-- > 0;) {
            std::uint64_t at = std::uint64_t{ids[i]} + first;
            if (knows(at) && !lists(at)) insert(at, links_[ends].prev, ends);
        }
    }
    void left(std::span<const Id> ids) override { gone(ids); }
    void gone(std::span<const Id> ids) override {
        for (std::size_t i = ids.size(); i-- > 0;) {
            prefetch(ids, i);
            std::uint64_t at = std::uint64_t{ids[i]} + first;
            if (lists(at))
                erase(at);
            else if (knows(at))
                links_[at] = {0, 0};
        }
    }
    void demoted(std::span<const Id> ids) override {
        for (std::size_t i = ids.size(); i-- > 0;) {
            std::uint64_t at = std::uint64_t{ids[i]} + first;
            if (!lists(at)) continue;
            erase(at);
            insert(at, ends, links_[ends].next);
        }
    }
    void hinted(std::span<const Id>, std::span<const Name>, double) override {}
    std::vector<Id> victims(std::size_t n) const override {
        std::vector<Id> ids;
        ids.reserve(std::min(n, size_));
        for (std::uint64_t at = links_[ends].next; at != ends && ids.size() < n;
             at = links_[at].next)
            ids.push_back(static_cast<Id>(at - first));
        return ids;
    }
    std::size_t size() const override { return size_; }
    std::size_t memory_bytes() const override { return links_.memory_bytes(); }

 private:
    struct Link {
        std::uint32_t prev,
            next;  // towards the cold end, towards the hot end; 0 if not in the list
    };
    // Item 1 is both ends of the list; block `id` is item id + 2. `aside`: `next` of a held block.
    static constexpr std::uint32_t ends = 1, first = 2, aside = 0xFFFFFFFF;

    bool knows(std::uint64_t at) const { return links_.reaches(at) && links_[at].next != 0; }
    bool lists(std::uint64_t at) const { return knows(at) && links_[at].next != aside; }
    void insert(std::uint64_t at, std::uint32_t prev, std::uint32_t next) {
        auto here = static_cast<std::uint32_t>(at);
        links_[at] = {prev, next};
        links_[prev].next = here;
        links_[next].prev = here;
        ++size_;
    }
    void erase(std::uint64_t at) {
        Link link = links_[at];
        links_[link.prev].next = link.next;
        links_[link.next].prev = link.prev;
        links_[at] = {0, 0};
        --size_;
    }
    void prefetch(std::span<const Id> ids, std::size_t i) const {
        constexpr std::size_t links_ahead = 16, neighbours_ahead = 8;
        if (i >= links_ahead) {
            std::uint64_t at = std::uint64_t{ids[i - links_ahead]} + first;
            if (links_.reaches(at)) __builtin_prefetch(&links_[at], 1);
        }
        if (i >= neighbours_ahead) {
            std::uint64_t at = std::uint64_t{ids[i - neighbours_ahead]} + first;
            if (!lists(at)) return;
            __builtin_prefetch(&links_[links_[at].prev], 1);
            __builtin_prefetch(&links_[links_[at].next], 1);
        }
    }

    Chunks<Link> links_;
    std::size_t size_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_lru() { return std::make_unique<Lru>(); }

}  // namespace kvtier
