// One record: a key with its first residency, or a further residency (group, shard) of that key.
//
//    0                               32      36      40      44      48      52      56    60    64
//    | key                           |parent |first  |next   |prev   |more   |slab   |slot |place |
//    |                               |       |child  |sibling|sibling|       |       |lease|flags |
//
// One cache line, so a match touches one line of the index and one record a key. Checksums lie in
// an array of their own, since only saves and demotions read them.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>

#include "chunks.h"
#include "lifecycle.h"

namespace kvtier {

using Id = std::uint32_t;
inline constexpr Id none = 0xFFFFFFFF;
inline constexpr Id max_records = 0x7FFFFFF0;  // a slot's table keeps one bit for itself
inline constexpr std::uint16_t max_leases = 65534;
inline constexpr std::size_t key_bytes = 32;
inline constexpr std::size_t checksum_bytes = 16;

struct Key {
    std::array<std::uint64_t, 4> words;
    static Key read(const char* bytes) {
        Key key;
        std::memcpy(key.words.data(), bytes, key_bytes);
        return key;
    }
    bool operator==(const Key&) const = default;
};

struct alignas(64) Record {
    Key key;
    Id parent;  // of a node: its parent; of a further residency: its node; of an unused record:
                // next
    Id first_child;
    Id next_sibling;
    Id prev_sibling;  // of a further residency: the residency before it
    Id more;          // the next residency of the same key
    std::uint32_t slab;
    std::uint16_t slot;
    std::uint16_t leases;
    std::uint32_t place : 24;  // which space, group and shard; a ghost's says only which space
    std::uint32_t state : 3;
    std::uint32_t further : 1;  // a further residency, not the node of its key
    std::uint32_t cut : 1;      // a node below one that lacks a block of a full group
    std::uint32_t summed : 1;   // has a checksum
    std::uint32_t loose : 1;    // a node whose parent went, to be linked again when that is saved
    std::uint32_t spare : 1;

    State is() const { return static_cast<State>(state); }
    void become(State next) { state = static_cast<std::uint32_t>(next); }
    bool evictable() const { return is() == State::ready && leases == 0; }
    // By its slot, not its state: a block of a batch that leaves is ABSENT before its slot is given
    // back.
    bool ghost() const { return slab == none && more == none; }
};
static_assert(sizeof(Record) == 64);

struct Checksum {
    std::array<char, checksum_bytes> bytes;
};

class Records {
 public:
    Record& operator[](Id id) { return items_[id]; }
    const Record& operator[](Id id) const { return items_[id]; }
    Checksum& checksum(Id id) { return checksums_[id]; }
    const Checksum& checksum(Id id) const { return checksums_[id]; }

    // Every id that was ever given out is below this.
    Id limit() const { return limit_; }
    bool known(Id id) const { return id < limit_ && items_[id].is() != State::unused; }
    Id node_of(Id id) const { return items_[id].further ? items_[id].parent : id; }

    Id make() {
        Id id = free_;
        if (id != none) {
            free_ = items_[id].parent;
        } else {
            if (limit_ == max_records) throw std::length_error("store: no more records");
            id = limit_;
            items_.reach(id);
            checksums_.reach(id);
            ++limit_;
        }
        Record& record = items_[id];
        record = Record{};
        record.parent = record.first_child = record.next_sibling = record.prev_sibling = none;
        record.more = record.slab = none;
        return id;
    }

    void drop(Id id) {
        items_[id].become(State::unused);
        items_[id].parent = free_;
        free_ = id;
    }

    std::size_t memory_bytes() const { return items_.memory_bytes() + checksums_.memory_bytes(); }

 private:
    Chunks<Record> items_;
    Chunks<Checksum> checksums_;
    Id limit_ = 0;
    Id free_ = none;
};

}  // namespace kvtier
