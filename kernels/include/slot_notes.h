// Notes about slots, in shared memory that survives the daemon: from them the next daemon takes
// over the blocks of its predecessor.
//
// There is one note for each page of an extent; a block is noted at the first page of its slot. A
// note is valid while its generation is that page's generation: freeing a slot increments the
// generation, so notes are never erased. The daemon may be killed at any instruction: a note's
// state and generation are written last.
#pragma once
#include <atomic>
#include <cstdint>

#include "record.h"

namespace kvtier {

// `reading`: a disk may write to the slot, also after the daemon has ended.
enum class Noted : std::uint32_t { nothing, writing, ready, reading };

struct SlotNote {
    std::uint64_t generation;
    Noted state;
    std::uint32_t owner;  // the session that writes it
    std::uint32_t space, group, shard;
    std::uint32_t has_parent : 1, summed : 1, lossy : 1, rest : 29;
    Key key, parent;
    Checksum checksum;
    std::uint64_t sequence;    // in the order of reservations
    std::uint64_t expires_ms;  // 0: never

    void become(Noted next) {
        std::atomic_ref<Noted>(state).store(next, std::memory_order_release);
    }
    // Between these two the note is invalid.
    void open() {
        std::atomic_ref<std::uint64_t>(generation).store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    void close(std::uint64_t of) {
        std::atomic_ref<std::uint64_t>(generation).store(of, std::memory_order_release);
    }
};
static_assert(sizeof(SlotNote) == 128);

// Where the notes of an extent may be valid: a run of its pages.
struct NotedPages {
    std::uint32_t extent;
    std::uint64_t first, pages;
};

// What a store took over. `writing`: slots that a session of an earlier daemon may still write to;
// the owner is 0 for a slot that a disk may still write to.
struct Adopted {
    std::vector<Id> ready, writing;
    std::vector<std::uint64_t> expires_ms;  // of each ready block
    std::vector<std::uint32_t> owners;      // of each slot that may be written to
    std::size_t dropped = 0;                // notes of unknown spaces, or that contradict others
};

}  // namespace kvtier
