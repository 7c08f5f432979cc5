// Evicts victims until slots of a size class are free: common to the memory of the host and to that
// of a GPU, which have slabs of their own.
#pragma once
#include <span>
#include <vector>

#include "slabs.h"

namespace kvtier {

// `slab_of` returns the slab of a victim in `slabs`, and `evict` frees its slot there.
//
// Uses first the victims whose slot can be used directly, or whose class can be reshaped. Skips a
// victim in an old slab of the wanted class: its bytes already belong to another class. If held
// blocks prevent the use of a victim's bytes, another block may be evicted instead.
template <class SlabOf, class Evict>
void make_room_in(Slabs& slabs, const Records& records, std::uint32_t wanted, std::uint64_t n,
                  std::span<const Id> victims, SlabOf slab_of, Evict evict) {
    std::vector<Id> in_the_way;
    slabs.new_round();
    slabs.reshape_vacant(wanted, n, false);
    bool more = true;
    for (bool patient : {true, false}) {
        for (std::size_t i = 0; more && i < victims.size() && slabs.room(wanted) < n; ++i) {
            if (i + 8 < victims.size() && victims[i + 8] < records.limit())
                __builtin_prefetch(&records[victims[i + 8]]);
            Id victim = victims[i];
            if (!records[victim].evictable() || slab_of(victim) == no_slab) continue;
            std::uint32_t slab = slab_of(victim), top = slabs.top(slab);
            std::uint32_t pays = slabs.class_of(top);
            if (slab == top && pays == wanted) {
                evict(victim);
                continue;
            }
            if (patient && pays != wanted && slabs.class_of(slab) == wanted) continue;
            bool clear = slabs.clearable(wanted, in_the_way);
            Laid laid = Laid::held;
            if (!clear && pays != wanted) laid = slabs.reshape(top, wanted);
            if (laid == Laid::yes) {
                if (slabs.room(wanted) >= n) break;
                clear = slabs.clearable(wanted, in_the_way);
            }
            if (!clear && !patient) {
                more = clear = slabs.find_clearable(wanted, in_the_way);
                // In a slab of the wanted class this gains nothing yet, but a repeated call gets
                // further, and the coldest block is evicted first.
                if (more && laid == Laid::too_short && slabs.room(wanted) < n)
                    in_the_way.assign(1, victim);
            }
            if (clear)
                for (Id id : in_the_way) evict(id);
        }
    }
    if (!victims.empty()) slabs.reshape_vacant(wanted, n, true);
}

}  // namespace kvtier
