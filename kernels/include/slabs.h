// Memory of blocks: slabs of equal slots in extents. A slab can change its pitch in place.
//
// A slab belongs to a size class (a pitch). To give a slot to another class, a slab of that class
// is *reshaped*: a new slab of the wanted pitch is laid over the same bytes (and over adjacent free
// runs and slabs of other classes); the old blocks stay and are still served. A new slot is free
// when no old block overlaps it. `clearable` returns the old blocks that overlap the next slot, in
// address order: the border between old and new slots stays narrower than one slot.
#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "record.h"
#include "slot_notes.h"

namespace kvtier {

inline constexpr std::uint64_t page_bytes = 4096;

struct SlotAddress {
    std::uint32_t extent;
    std::uint32_t reserved;
    std::uint64_t offset;
    std::uint64_t generation;
};
static_assert(sizeof(SlotAddress) == 24);

struct Slab {
    std::uint32_t size_class;
    std::uint32_t extent;
    std::uint64_t start, pages;
    std::vector<Id> table;  // the block of each slot, or how the slot is vacant (see below)
    // how many old blocks overlap each slot; empty without old blocks
    std::vector<std::uint32_t> covered;
    std::vector<std::uint32_t> under;  // the old slabs under this one, by address
    std::uint32_t over = none;         // the slab laid over this one
    std::uint32_t used = 0, free = 0;
    Id free_head = none;
    std::uint32_t cursor = 0;           // where the search for the next clearable slot continues
    std::uint64_t stuck_round = 0;      // the round in which no slot could be cleared
    std::uint64_t exhausted_round = 0;  // the round in which it had no slot to give
    std::uint32_t next = none, prev = none;  // list of the slabs of this class with free slots

    std::uint32_t slots() const { return static_cast<std::uint32_t>(table.size()); }
};

enum class Laid { yes, too_short, held };

class Slabs {
 public:
    explicit Slabs(const Records& records) : records_(records) {}

    // `notes` has a note for each page, or is null.
    std::uint32_t add_extent(std::uint64_t bytes, std::uint64_t* generations, SlotNote* notes);
    // The size class of such blocks. It exists until all its users have left and it has no slab.
    std::uint32_t join_class(std::uint64_t block_bytes);
    void leave_class(std::uint32_t size_class) { --classes_[size_class].users; }
    std::size_t living_classes() const {
        return static_cast<std::size_t>(
            std::ranges::count_if(classes_, [](const Class& one) { return one.lives(); }));
    }
    std::uint64_t pitch_of(std::uint32_t size_class) const { return classes_[size_class].pitch; }
    static std::uint64_t pitch_for(std::uint64_t block_bytes);

    std::uint64_t room(std::uint32_t size_class) const {
        return classes_[size_class].free + classes_[size_class].carvable;
    }
    // Gives the block a slot without evicting; there must be room.
    std::pair<std::uint32_t, std::uint16_t> take(std::uint32_t size_class, Id id);
    // Frees a slot and increments its generation, so that readers of the old block detect it.
    void release(std::uint32_t slab, std::uint16_t slot);
    SlotAddress address(std::uint32_t slab, std::uint16_t slot) const;
    // The block with this slot and generation; none if there is none.
    Id at(const SlotAddress& slot) const;
    // The note of a slot; null for an extent without notes.
    SlotNote* note(std::uint32_t slab, std::uint16_t slot) const;

    // Gives no slot of this extent to a block from now on. Its blocks stay until they are released.
    void retire(std::uint32_t extent);
    // The bytes of the blocks in this extent, which is retired.
    std::uint64_t retired_bytes(std::uint32_t extent) const { return extents_[extent].left_bytes; }
    template <class Visit>
    void each_retired(Visit visit) const {
        for (const auto& slab : slabs_)
            if (slab && extents_[slab->extent].retired)
                for (Id id : slab->table)
                    if (live(id)) visit(id);
    }

    // A slot that is known from a note. `lay` makes slabs over free runs for slots of one extent,
    // in ascending order, and fills in `slab` and `slot`; `put` then gives each slot its block, and
    // `open` frees the slots of these slabs that got none.
    struct Known {
        std::uint64_t page;
        std::uint32_t size_class;
        std::uint32_t slab = none;
        std::uint16_t slot = 0;
    };
    const SlotNote* notes(std::uint32_t extent) const { return extents_[extent].notes; }
    std::size_t extents() const { return extents_.size(); }
    std::uint64_t pages(std::uint32_t extent) const { return extents_[extent].pages; }
    std::uint64_t pages_of(std::uint32_t size_class) const {
        return classes_[size_class].pitch / page_bytes;
    }
    bool is_current(std::uint32_t extent, std::uint64_t page) const;
    void outdate(std::uint32_t extent, std::uint64_t page);
    void lay(std::uint32_t extent, std::vector<Known>& slots);
    void put(const Known& slot, Id id);
    void open(const std::vector<Known>& slots);

    std::uint32_t top(std::uint32_t slab) const {
        return slabs_[slab]->over == none ? slab : slabs_[slab]->over;
    }
    std::uint32_t class_of(std::uint32_t slab) const { return slabs_[slab]->size_class; }

    // The steps of a plan. `clearable` returns the evictable blocks that overlap the next slot of a
    // reshaped slab. `reshape` lays a slab of the class over this slab, if held blocks (which
    // cannot be evicted) leave it a slot. `reshape_vacant` reshapes slabs that are half vacant or
    // contain no victim, until there is room for n. `find_clearable` returns the blocks of any slot
    // that can be freed.
    void new_round() { ++round_; }
    bool clearable(std::uint32_t size_class, std::vector<Id>& blocks);
    Laid reshape(std::uint32_t slab, std::uint32_t size_class);
    void reshape_vacant(std::uint32_t size_class, std::uint64_t n, bool thorough);
    bool find_clearable(std::uint32_t size_class, std::vector<Id>& blocks);

    std::uint64_t capacity_bytes() const { return capacity_pages_ * page_bytes; }
    std::uint64_t free_bytes() const { return capacity_bytes() - live_bytes_; }
    std::size_t memory_bytes() const;
    // `place_of` returns the slab and the slot that the block has by its own record.
    void check(const std::function<std::pair<std::uint32_t, std::uint16_t>(Id)>& place_of) const;

 private:
    // Vacant slots: free ones form a linked list (mark | next). Closed ones overlap an old block
    // or, in an old slab, are never used again.
    static constexpr Id mark = 0x80000000, list_end = 0x7FFFFFFF, closed = 0xFFFFFFFE;
    static bool live(Id entry) { return !(entry & mark); }

    struct Extent {
        std::uint64_t pages;
        std::uint64_t* generations;
        SlotNote* notes;
        std::map<std::uint64_t, std::uint64_t> runs;   // free: first page -> pages
        std::map<std::uint64_t, std::uint32_t> slabs;  // uppermost: first page -> slab
        bool retired = false;                          // then it has neither runs nor listed slabs
        std::uint64_t left_bytes = 0;                  // of the blocks of a retired extent
    };
    struct Class {
        std::uint64_t pitch;
        std::uint64_t slab_slots, slab_pages;  // the preferred size of a slab
        std::uint32_t users = 0, slabs = 0;
        std::uint64_t free = 0;               // slots in slabs
        std::uint64_t carvable = 0;           // slots that the free runs would yield
        std::uint32_t available = none;       // slabs with free slots
        std::vector<std::uint32_t> reshaped;  // slabs with old blocks under them, oldest first
        bool lives() const { return users || slabs; }
    };
    struct Region {
        std::uint64_t start, end;
        std::vector<std::uint32_t> slabs;  // by address
    };

    std::uint64_t first_byte(const Slab& slab, std::uint32_t slot) const {
        return slab.start * page_bytes + slot * classes_[slab.size_class].pitch;
    }
    std::uint64_t carvable(const Class& size_class, std::uint64_t pages) const;
    void add_run(std::uint32_t extent, std::uint64_t start, std::uint64_t pages);
    void put_run(std::uint32_t extent, std::uint64_t start, std::uint64_t pages);
    void cut_run(std::uint32_t extent, std::uint64_t start, std::uint64_t pages);

    std::uint32_t make_slab(std::uint32_t size_class, std::uint32_t extent, std::uint64_t start,
                            std::uint64_t pages, std::uint64_t slots);
    void drop_slab(std::uint32_t slab);
    void drop_slabs(std::uint32_t extent);
    void carve(std::uint32_t size_class);
    void dissolve(std::uint32_t slab);
    void settle(std::uint32_t slab);
    void push_free(std::uint32_t slab, std::uint32_t slot);
    void link(std::uint32_t slab);
    void unlink(std::uint32_t slab);
    void uncover(std::uint32_t slab, std::uint64_t first, std::uint64_t end);

    Region region_of(std::uint32_t slab) const;
    void widen(Region& region, std::uint32_t extent, std::uint32_t size_class) const;
    bool absorb_runs(Region& region, const Extent& extent) const;
    std::uint64_t slots_in(const Region& region, std::uint64_t pitch) const;
    template <class Visit>
    void each_overlap(const Region& region, std::uint64_t pitch, std::uint64_t slots,
                      Visit visit) const;
    std::vector<std::uint32_t> cover(const Region& region, std::uint64_t pitch,
                                     std::uint64_t slots) const;
    bool leaves_a_slot(const Region& region, std::uint64_t pitch, std::uint64_t slots) const;
    Id evictable_in(const Slab& slab) const;
    bool any_evictable(const Slab& slab) const;
    bool release_vacant(std::uint32_t slab, std::uint32_t size_class);
    void lay(const Region& region, std::uint32_t extent, std::uint32_t size_class,
             std::vector<std::uint32_t> covered);
    // Calls visit(old slab, slot) for each live old block that overlaps the slot; stops when it
    // returns false.
    template <class Visit>
    bool each_under(const Slab& slab, std::uint32_t slot, Visit visit) const;

    const Records& records_;
    std::vector<Extent> extents_;
    std::vector<Class> classes_;
    std::vector<std::unique_ptr<Slab>> slabs_;
    std::vector<std::uint32_t> spare_;  // numbers of removed slabs
    std::set<std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>> sizes_;  // runs by length
    std::uint64_t capacity_pages_ = 0, live_bytes_ = 0, round_ = 0;
};

}  // namespace kvtier
