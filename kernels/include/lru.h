// Least recently used, as one linked list over ids: 8 bytes a block.
#pragma once
#include "chunks.h"
#include "policy.h"

namespace kvtier {

class Lru final : public Policy {
 public:
    Lru();
    void added(std::span<const Id> ids, std::span<const Name> names,
               std::span<const Id> parents) override;
    void wanted(std::span<const Id> ids, std::span<const Name>) override { refreshed(ids); }
    void refreshed(std::span<const Id> ids) override;
    void held(std::span<const Id> ids) override;
    void freed(std::span<const Id> ids) override;
    void left(std::span<const Id> ids) override { gone(ids); }
    void gone(std::span<const Id> ids) override;
    void demoted(std::span<const Id> ids) override;
    void hinted(std::span<const Id>, double) override {}
    std::vector<Id> victims(std::size_t n) const override;
    std::size_t size() const override { return size_; }
    std::size_t memory_bytes() const override { return links_.memory_bytes(); }

 private:
    struct Link {
        std::uint32_t prev, next;  // towards the cold end, towards the hot end; 0 for not here
    };
    // Place 1 is the list's both ends; the block `id` is at id + 2. `aside` is the next of one that
    // is held.
    static constexpr std::uint32_t ends = 1, first = 2, aside = 0xFFFFFFFF;

    bool knows(std::uint64_t at) const { return links_.reaches(at) && links_[at].next != 0; }
    bool lists(std::uint64_t at) const { return knows(at) && links_[at].next != aside; }
    void insert(std::uint64_t at, std::uint32_t prev, std::uint32_t next);
    void erase(std::uint64_t at);
    void prefetch(std::span<const Id> ids, std::size_t i) const;

    Chunks<Link> links_;
    std::size_t size_ = 0;
};

}  // namespace kvtier
