// Least recently used, as one linked list over ids: 8 bytes a block.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "chunks.h"

namespace kvtier {

class Lru {
 public:
    Lru();
    void added(std::span<const std::uint32_t> ids);
    void touched(std::span<const std::uint32_t> ids);
    void removed(std::span<const std::uint32_t> ids);
    void demoted(std::span<const std::uint32_t> ids);
    std::vector<std::uint32_t> victims(std::size_t n) const;
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const { return links_.memory_bytes(); }

 private:
    struct Link {
        std::uint32_t prev, next;  // towards the cold end, towards the hot end; 0 for not here
    };
    // Place 1 is the list's both ends; the block `id` is at id + 2.
    static constexpr std::uint64_t ends = 1, first = 2;

    bool holds(std::uint64_t at) const { return links_.reaches(at) && links_[at].next != 0; }
    void insert(std::uint64_t at, std::uint32_t prev, std::uint32_t next);
    void erase(std::uint64_t at);
    void prefetch(std::span<const std::uint32_t> ids, std::size_t i) const;

    Chunks<Link> links_;
    std::size_t size_ = 0;
};

}  // namespace kvtier
