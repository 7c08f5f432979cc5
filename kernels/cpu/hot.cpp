// Copies of blocks in the memory of a GPU: their slots, and the order of their use.
#include "hot.h"

#include "make_room.h"

namespace kvtier {

void HotCopies::make_room(std::uint32_t size_class, std::uint64_t n, bool evict) {
    if (!evict) {  // only slots of other sizes that are vacant
        slabs_.new_round();
        slabs_.reshape_vacant(size_class, n, true);
        return;
    }
    while (slabs_.room(size_class) < n) {
        const std::uint64_t before = ready_;
        std::vector<Id> victims;
        std::size_t examined = 0;
        const std::uint64_t short_by = n - slabs_.room(size_class);
        for (Id id = oldest_; id != none && examined < search_limit && victims.size() < short_by;
             id = places_[id].newer, ++examined)
            if (records_[id].evictable()) victims.push_back(id);
        make_room_in(
            slabs_, records_, size_class, n, victims,
            [this](Id id) { return has(id) ? places_[id].slab : no_slab; },
            [this](Id id) { this->evict(id); });
        if (ready_ == before) return;
    }
}

void HotCopies::take(std::uint32_t size_class, Id id) {
    const auto [slab, slot] = slabs_.take(size_class, id);
    places_.reach(id);
    places_[id] = {slab, slot, CopyState::writing, none, none};
    ++writing_;
}

void HotCopies::commit(std::span<const Id> ids) {
    for (Id id : ids) need(writes(id), "no copy of this block is being written");
    for (Id id : ids) {
        places_[id].state = CopyState::ready;
        --writing_;
        ++ready_;
        link(id);
    }
}

void HotCopies::abort(std::span<const Id> ids) {
    for (Id id : ids) need(writes(id), "no copy of this block is being written");
    for (Id id : ids) {
        --writing_;
        release(id);
    }
}

void HotCopies::evict(Id id) {
    unlink(id);
    --ready_;
    ++evicted_;
    release(id);
}

void HotCopies::release(Id id) {
    slabs_.release(places_[id].slab, places_[id].slot);
    places_[id].state = CopyState::none;
}

void HotCopies::use(Id id) {
    if (newest_ == id) return;
    unlink(id);
    link(id);
}

void HotCopies::link(Id id) {
    places_[id].newer = none;
    places_[id].older = newest_;
    (newest_ == none ? oldest_ : places_[newest_].newer) = id;
    newest_ = id;
}

void HotCopies::unlink(Id id) {
    const CopyPlace& place = places_[id];
    (place.newer == none ? newest_ : places_[place.newer].older) = place.older;
    (place.older == none ? oldest_ : places_[place.older].newer) = place.newer;
}

SlotAddress HotCopies::slot(Id id) const {
    SlotAddress slot = slabs_.address(places_[id].slab, places_[id].slot);
    slot.extent = number_;
    return slot;
}

// Checks that all structures agree; for tests.
void HotCopies::check() const {
    auto hold = [](bool condition, const char* what) {
        if (!condition) throw std::logic_error(what);
    };
    slabs_.check([this](Id id) {
        const bool held = state_of(id) != CopyState::none;
        return held ? std::pair{places_[id].slab, places_[id].slot}
                    : std::pair{no_slab, std::uint16_t{0}};
    });
    std::uint64_t ready = 0, writing = 0;
    for (Id id = 0; id < records_.limit(); ++id) {
        if (state_of(id) == CopyState::none) continue;
        (has(id) ? ready : writing) += 1;
        hold(records_.known(id) && records_[id].slab != no_slab, "a copy outlived its block");
        hold(has(id) || records_[id].leases, "a copy is written, and its block is not leased");
    }
    hold(ready == ready_ && writing == writing_, "the count of copies is wrong");
    Id before = none;
    for (Id id = oldest_; id != none; id = places_[id].newer, --ready) {
        hold(has(id) && places_[id].older == before, "the order of copies is wrong");
        before = id;
    }
    hold(ready == 0 && before == newest_, "a copy is not in the order of copies");
}

}  // namespace kvtier
