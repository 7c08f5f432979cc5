// Notes about slots, in shared memory that survives the daemon: from them the next daemon takes
// over the blocks of its predecessor.
//
// There is one note for each page of an extent; a block is noted at the first page of its slot. A
// note is valid while its generation is that page's generation: freeing a slot increments the
// generation, so notes are never erased. The daemon may be killed at any instruction: what a
// note says changes with one store, of its generation or of its mark.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "record.h"
#include "xxh3.h"

namespace kvtier {

// `reading`: a disk may write to the slot, also after the daemon has ended.
enum class Noted : std::uint32_t { nothing, writing, ready, reading };

struct alignas(8) NoteMark {
    std::uint32_t owner;  // the session that writes it
    Noted state : 2;
    std::uint32_t has_parent : 1, summed : 1, lossy : 1;
    std::uint32_t sum : 27;  // of the whole note
};
static_assert(sizeof(NoteMark) == 8);

struct SlotNote {
    static constexpr std::uint64_t opened = ~std::uint64_t{0};

    std::uint64_t generation;
    std::uint32_t space, group, shard, rest;
    NoteMark mark;
    Key key, parent;
    Checksum checksum;         // of a block that is ready
    std::uint64_t sequence;    // in the order of reservations
    std::uint64_t expires_ms;  // 0: never

    void become(NoteMark next) { become(next, generation); }
    // Between these two the note is invalid.
    void open() {
        std::atomic_ref<std::uint64_t>(generation).store(opened, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    void close(NoteMark last, std::uint64_t of) {
        become(last, of);
        std::atomic_ref<std::uint64_t>(generation).store(of, std::memory_order_release);
    }
    // False if its bytes have changed otherwise than by these functions.
    bool is_whole() const {
        if (generation == opened) return true;
        if (generation == 0) {
            const SlotNote blank{};
            return std::memcmp(this, &blank, sizeof blank) == 0;
        }
        return mark.sum == sum_with(mark, generation);
    }

 private:
    void become(NoteMark next, std::uint64_t of) {
        next.sum = sum_with(next, of);
        std::atomic_ref<NoteMark>(mark).store(next, std::memory_order_release);
    }
    std::uint32_t sum_with(NoteMark with, std::uint64_t of) const {
        SlotNote copy = *this;
        with.sum = 0;
        copy.mark = with;
        copy.generation = of;
        // It is written before the mark says so.
        if (with.state != Noted::ready || !with.summed) copy.checksum = {};
        std::uint32_t digest[4];
        xxh3_128(reinterpret_cast<const std::uint8_t*>(&copy), sizeof copy, 0,
                 reinterpret_cast<std::uint8_t*>(digest));
        return digest[0] >> 5;
    }
};
static_assert(sizeof(SlotNote) == 128 && offsetof(SlotNote, mark) % 8 == 0);

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
