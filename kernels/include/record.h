// One record: a key with its first residency, or a further residency (group, shard) of that key.
//
//    0                               32      36      40      44      48      52      56    60    64
//    | key                           |parent |first  |next   |prev   |more   |slab   |slot |place |
//    |                               |       |child  |sibling|sibling|       |flags  |lease|flags |
//
// A record is one cache line, so a match reads one line of the index and one record per key.
// Checksums and frames are in separate arrays: only saves and demotions read checksums, and a store
// without a disk has no frames.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "chunks.h"
#include "lifecycle.h"

namespace kvtier {

inline void need(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

using Id = std::uint32_t;
inline constexpr Id none = 0xFFFFFFFF;
inline constexpr Id max_records = 0x7FFFFFF0;  // the table of a slab uses one bit for itself
inline constexpr std::uint16_t max_leases = 65534;
inline constexpr std::uint32_t no_slab = (1U << 30) - 1;
// Tiers are numbers: `memory`, then those below it, which have frames. Their owner names them.
inline constexpr std::uint32_t memory = 0, max_tiers = 4;
inline constexpr std::size_t key_bytes = 32;
inline constexpr std::size_t checksum_bytes = 16;

struct Key {
    std::array<std::uint64_t, 4> words;
    static Key read(const char* bytes) {
        Key key;
        std::memcpy(key.words.data(), bytes, key_bytes);
        return key;
    }
    // Written out, because the compiler's default calls memcmp.
    bool operator==(const Key& other) const {
        return ((words[0] ^ other.words[0]) | (words[1] ^ other.words[1]) |
                (words[2] ^ other.words[2]) | (words[3] ^ other.words[3])) == 0;
    }
};

struct alignas(64) Record {
    Key key;
    Id parent;  // of a node: its parent; of a further residency: its node; if unused: the next
    Id first_child;
    Id next_sibling;
    Id prev_sibling;            // of a further residency: the residency before it
    Id more;                    // the next residency of the same key
    std::uint32_t slab : 30;    // a slab has at least a page, so there are never that many
    std::uint32_t filling : 1;  // a read from a tier below fills its slot
    std::uint32_t lossy : 1;    // the bytes in its slot were decoded with loss
    std::uint16_t slot;
    std::uint16_t leases;
    std::uint32_t place : 21;  // which space, group and shard; a ghost's says only which space
    std::uint32_t state : 3;
    std::uint32_t tier : 2;     // `memory` while it has a slot, then where its frame is
    std::uint32_t further : 1;  // a further residency, not the node of its key
    std::uint32_t cut : 1;      // a node below one that lacks a block of a full group
    std::uint32_t summed : 1;   // has a checksum
    std::uint32_t loose : 1;    // a node whose parent is gone, linked again when that is saved
    std::uint32_t framed : 1;   // has a frame in a tier below
    std::uint32_t used : 1;     // used again since its frame was written

    State is() const { return static_cast<State>(state); }
    void become(State next) { state = static_cast<std::uint32_t>(next); }
    bool in_memory() const { return is() == State::ready && tier == memory; }
    bool evictable() const { return in_memory() && leases == 0; }
    // Checks the place, not the state: a block of a batch is ABSENT before it leaves its place.
    bool ghost() const { return slab == no_slab && tier == memory && more == none; }
};
static_assert(sizeof(Record) == 64);

// The checksum of the block's bytes; of a block with a frame, that of the payload, equal for a raw
// frame. A block in memory with an encoded frame has a second one, of its bytes.
struct Checksum {
    std::array<char, checksum_bytes> bytes;
};

// The position of a block in a tier below memory, and its encoding. The owner of a segment chooses
// its number, which no segment of another tier has. Flags are those of a footer's row:
// `lossy_frame` marks a frame that was encoded with loss.
struct Frame {
    std::uint32_t segment, page, payload_bytes;
    std::uint8_t codec, header_pages, flags;
    // Used by the store only, 0 outside of it.
    std::uint8_t tier : 2;
    std::uint8_t has_own : 1;  // encoded, and the checksum of the bytes in memory is known
    std::uint8_t rounds : 3;   // in how many rounds of its segments it was used
    std::uint8_t zero : 2;     // named, because compilers do not clear bits without a name

    // The size in its tier: header and payload are whole pages.
    std::uint64_t bytes() const {
        constexpr std::uint64_t page = 4096;
        return (header_pages + (payload_bytes + page - 1) / page) * page;
    }
};
inline constexpr std::uint8_t lossy_frame = 2;
inline constexpr std::uint8_t proven = 3;  // the maximum count of rounds
inline constexpr std::uint8_t spared = 4;  // it was not used in the last one
static_assert(sizeof(Frame) == 16 && max_tiers <= 4);

class Records {
 public:
    Record& operator[](Id id) { return items_[id]; }
    const Record& operator[](Id id) const { return items_[id]; }
    Checksum& checksum(Id id) { return checksums_[id]; }
    const Checksum& checksum(Id id) const { return checksums_[id]; }
    const Frame& frame(Id id) const { return frames_[id]; }
    void set_frame(Id id, const Frame& frame) {
        std::uint8_t rounds = items_[id].framed ? frames_[id].rounds : 0;
        forget_frame(id);
        frames_.reach(id);
        frames_[id] = frame;
        frames_[id].rounds = rounds;
        frames_[id].has_own = 0;
        ++framed_blocks_;
        framed_bytes_ += frame.bytes();
        items_[id].framed = 1;
        items_[id].used = 0;
    }
    // Ends the round of the block's segment; returns true if the block is to be copied: it was used
    // in this round, or, once more, it was used in three rounds.
    bool judge(Id id) {
        Frame& frame = frames_[id];
        if (items_[id].used) {
            items_[id].used = 0;
            frame.rounds = std::min<std::uint8_t>((frame.rounds & ~spared) + 1, proven);
            return true;
        }
        if (frame.rounds != proven) return false;
        frame.rounds |= spared;
        return true;
    }
    bool encoded(Id id) const { return items_[id].framed && frames_[id].codec; }
    // True if the checksum of the block's own bytes is known.
    bool summed(Id id) const { return items_[id].summed && (!encoded(id) || frames_[id].has_own); }
    const Checksum& own_checksum(Id id) const { return encoded(id) ? own_[id] : checksums_[id]; }
    void set_own_checksum(Id id, const Checksum& own) {
        if (!encoded(id)) {
            checksums_[id] = own;
            items_[id].summed = 1;
            return;
        }
        own_.reach(id);
        own_[id] = own;
        frames_[id].has_own = 1;
    }
    // The bytes in memory will be those that are decoded from the frame.
    void drop_own_checksum(Id id) { frames_[id].has_own = 0; }
    // Removes the frame, and a checksum that covers only its payload.
    void drop_frame(Id id) {
        items_[id].summed = summed(id);
        if (items_[id].summed) checksums_[id] = own_checksum(id);
        forget_frame(id);
    }
    std::uint64_t framed_blocks() const { return framed_blocks_; }
    std::uint64_t framed_bytes() const { return framed_bytes_; }  // in the tiers below

    // All ids that were ever used are below this.
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
        record.more = none;
        record.slab = no_slab;
        return id;
    }

    void drop(Id id) {
        items_[id].become(State::unused);
        items_[id].parent = free_;
        free_ = id;
    }

    std::size_t memory_bytes() const {
        return items_.memory_bytes() + checksums_.memory_bytes() + own_.memory_bytes() +
               frames_.memory_bytes();
    }

 private:
    void forget_frame(Id id) {
        if (!items_[id].framed) return;
        --framed_blocks_;
        framed_bytes_ -= frames_[id].bytes();
        items_[id].framed = items_[id].used = 0;
    }

    Chunks<Record> items_;
    Chunks<Checksum> checksums_, own_;
    Chunks<Frame> frames_;
    std::uint64_t framed_blocks_ = 0, framed_bytes_ = 0;
    Id limit_ = 0;
    Id free_ = none;
};

}  // namespace kvtier
