// Copies of blocks in the memory of one GPU, beside their slots in memory.
//
// Only a block with a slot in memory has a copy: it goes when the block leaves memory, so to evict
// a copy loses nothing. A lease on the block also holds its copy. While a copy is written, its
// block is leased, so the record of the block says which slots may be freed, for both kinds of
// memory.
#pragma once
#include <span>
#include <vector>

#include "slabs.h"

namespace kvtier {

enum class CopyState : std::uint16_t { none, writing, ready };

// What a request for a copy gets: a slot, or why not.
enum class CopyAnswer : char { granted = 0, present = 1, in_progress = 2, no_room = 4 };

struct CopyPlace {
    std::uint32_t slab;
    std::uint16_t slot;
    CopyState state;
    Id newer, older;  // of the copies that are ready, by their last use
};
static_assert(sizeof(CopyPlace) == 16);

class HotCopies {
 public:
    // Slots name this memory `number`. It has a generation for each page, as an extent.
    HotCopies(const Records& records, std::uint32_t number, std::uint64_t bytes,
              std::uint64_t* generations)
        : records_(records), slabs_(records), number_(number) {
        slabs_.add_extent(bytes, generations, nullptr);
    }

    // Takes slots for the copies of these leased blocks, in order. `bytes_of` returns the size of a
    // block. With `evict` it drops copies that no lease holds, those first that were not used for
    // the longest time. A block that has a copy counts as used.
    template <class BytesOf>
    std::vector<CopyAnswer> reserve(std::span<const Id> ids, bool evict, BytesOf bytes_of);
    void commit(std::span<const Id> ids);
    void abort(std::span<const Id> ids);
    // The block leaves memory. Nobody writes its copy, because then it would be leased.
    void drop(Id id) {
        if (state_of(id) == CopyState::ready) evict(id), --evicted_;
    }
    bool has(Id id) const { return state_of(id) == CopyState::ready; }
    bool writes(Id id) const { return state_of(id) == CopyState::writing; }
    SlotAddress slot(Id id) const;
    void use(Id id);

    std::uint64_t blocks() const { return ready_; }
    std::uint64_t writing() const { return writing_; }
    std::uint64_t capacity_bytes() const { return slabs_.capacity_bytes(); }
    std::uint64_t used_bytes() const { return slabs_.capacity_bytes() - slabs_.free_bytes(); }
    std::uint64_t evicted() const { return evicted_; }  // to make room
    std::size_t memory_bytes() const { return places_.memory_bytes() + slabs_.memory_bytes(); }
    void check() const;

 private:
    // Blocks that one search for victims examines: leased ones are skipped.
    static constexpr std::size_t search_limit = 4096;

    CopyState state_of(Id id) const {
        return places_.reaches(id) ? places_[id].state : CopyState::none;
    }
    void make_room(std::uint32_t size_class, std::uint64_t n, bool evict);
    void take(std::uint32_t size_class, Id id);
    void link(Id id);
    void unlink(Id id);
    void release(Id id);
    void evict(Id id);

    const Records& records_;
    Slabs slabs_;
    Chunks<CopyPlace> places_;  // by the block's id
    Id newest_ = none, oldest_ = none;
    std::uint32_t number_;
    std::uint64_t ready_ = 0, writing_ = 0, evicted_ = 0;
};

template <class BytesOf>
std::vector<CopyAnswer> HotCopies::reserve(std::span<const Id> ids, bool evict, BytesOf bytes_of) {
    std::vector<CopyAnswer> answers(ids.size(), CopyAnswer::granted);
    // A run of blocks of one size at a time, so that its room is made at once.
    for (std::size_t first = 0, end; first < ids.size(); first = end) {
        const std::uint64_t bytes = bytes_of(ids[first]);
        std::uint64_t wanted = 0;
        for (end = first; end < ids.size() && bytes_of(ids[end]) == bytes; ++end) {
            if (has(ids[end])) {
                use(ids[end]);
                answers[end] = CopyAnswer::present;
            } else if (writes(ids[end])) {
                answers[end] = CopyAnswer::in_progress;
            } else {
                ++wanted;
            }
        }
        // The class lasts as long as it has slabs.
        const std::uint32_t size_class = slabs_.join_class(bytes);
        if (wanted) make_room(size_class, wanted, evict);
        for (std::size_t i = first; i < end; ++i) {
            if (answers[i] != CopyAnswer::granted) continue;
            if (slabs_.room(size_class) == 0)
                answers[i] = CopyAnswer::no_room;
            else
                take(size_class, ids[i]);
        }
        slabs_.leave_class(size_class);
    }
    return answers;
}

}  // namespace kvtier
