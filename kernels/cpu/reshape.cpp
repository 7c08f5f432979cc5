// Changes the pitch of a slab while old blocks remain in it; and checks all of these structures.
#include <algorithm>

#include "slabs.h"

namespace kvtier {
namespace {

constexpr std::uint64_t max_slots = 65535;  // a record has 16 bits for its slot
constexpr int donors_asked = 8;             // slabs of a class that `reshape_vacant` examines

void hold(bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
}

}  // namespace

template <class Visit>
bool Slabs::each_under(const Slab& slab, std::uint32_t slot, Visit visit) const {
    std::uint64_t first = first_byte(slab, slot), end = first + classes_[slab.size_class].pitch;
    for (std::uint32_t number : slab.under) {
        const Slab& old = *slabs_[number];
        std::uint64_t pitch = classes_[old.size_class].pitch, base = old.start * page_bytes;
        if (end <= base || first >= base + old.slots() * pitch) continue;
        std::uint64_t i = first <= base ? 0 : (first - base) / pitch;
        for (; i < old.slots() && base + i * pitch < end; ++i)
            if (live(old.table[i]) && !visit(number, static_cast<std::uint32_t>(i))) return false;
    }
    return true;
}

// Old blocks left these bytes: frees the slots over them that no old block overlaps any longer.
void Slabs::uncover(std::uint32_t number, std::uint64_t first, std::uint64_t end) {
    Slab& slab = *slabs_[number];
    std::uint64_t pitch = classes_[slab.size_class].pitch, base = slab.start * page_bytes;
    std::uint64_t last = std::min<std::uint64_t>(slab.slots(), (end - base + pitch - 1) / pitch);
    for (std::uint64_t slot = (first - base) / pitch; slot < last; ++slot)
        if (--slab.covered[slot] == 0) push_free(number, static_cast<std::uint32_t>(slot));
}

bool Slabs::clearable(std::uint32_t size_class, std::vector<Id>& blocks) {
    for (std::uint32_t number : classes_[size_class].reshaped) {
        Slab& slab = *slabs_[number];
        if (slab.stuck_round == round_) continue;
        for (std::uint32_t tried = 0; tried < slab.slots(); ++tried) {
            std::uint32_t slot = slab.cursor;
            slab.cursor = slot + 1 == slab.slots() ? 0 : slot + 1;
            if (slab.covered[slot] == 0) continue;
            blocks.clear();
            bool clear = each_under(slab, slot, [&](std::uint32_t old, std::uint32_t i) {
                Id id = slabs_[old]->table[i];
                blocks.push_back(id);
                return records_[id].evictable();
            });
            if (clear) return true;
        }
        slab.stuck_round = round_;
    }
    return false;
}

Slabs::Region Slabs::region_of(std::uint32_t number) const {
    const Slab& slab = *slabs_[number];
    Region region{slab.start, slab.start + slab.pages, {number}};
    absorb_runs(region, extents_[slab.extent]);
    return region;
}

bool Slabs::absorb_runs(Region& region, const Extent& extent) const {
    bool grew = false;
    auto right = extent.runs.find(region.end);
    if (right != extent.runs.end()) {
        region.end += right->second;
        grew = true;
    }
    auto left = extent.runs.lower_bound(region.start);
    if (left != extent.runs.begin()) {
        --left;
        if (left->first + left->second == region.start) {
            region.start = left->first;
            grew = true;
        }
    }
    return grew;
}

// Adds adjacent slabs of other classes to the region, until it holds a whole slot of the class.
void Slabs::widen(Region& region, std::uint32_t in, std::uint32_t size_class) const {
    const Extent& extent = extents_[in];
    while (region.end - region.start < classes_[size_class].slab_pages) {
        auto beside = extent.slabs.find(region.end);
        if (beside != extent.slabs.end() && slabs_[beside->second]->size_class != size_class) {
            region.end += slabs_[beside->second]->pages;
            region.slabs.push_back(beside->second);
        } else {
            beside = extent.slabs.lower_bound(region.start);
            if (beside == extent.slabs.begin()) return;
            --beside;
            const Slab& slab = *slabs_[beside->second];
            if (slab.start + slab.pages != region.start || slab.size_class == size_class) return;
            region.start = slab.start;
            region.slabs.insert(region.slabs.begin(), beside->second);
        }
        absorb_runs(region, extent);
    }
}

std::uint64_t Slabs::slots_in(const Region& region, std::uint64_t pitch) const {
    return std::min(max_slots, (region.end - region.start) * page_bytes / pitch);
}

// Calls visit(block, slot) for each live block of the region and each new slot that it overlaps.
template <class Visit>
void Slabs::each_overlap(const Region& region, std::uint64_t pitch, std::uint64_t slots,
                         Visit visit) const {
    std::uint64_t base = region.start * page_bytes;
    auto each_in = [&](const Slab& slab) {
        std::uint64_t old_pitch = classes_[slab.size_class].pitch;
        for (std::uint32_t i = 0; i < slab.slots(); ++i) {
            if (!live(slab.table[i])) continue;
            std::uint64_t first = first_byte(slab, i) - base, end = first + old_pitch;
            std::uint64_t last = std::min(slots, (end + pitch - 1) / pitch);
            for (std::uint64_t slot = first / pitch; slot < last; ++slot)
                visit(slab.table[i], slot);
        }
    };
    for (std::uint32_t number : region.slabs) {
        each_in(*slabs_[number]);
        for (std::uint32_t old : slabs_[number]->under) each_in(*slabs_[old]);
    }
}

// How many live blocks in the region overlap each slot of the new layout.
std::vector<std::uint32_t> Slabs::cover(const Region& region, std::uint64_t pitch,
                                        std::uint64_t slots) const {
    std::vector<std::uint32_t> covered(slots, 0);
    each_overlap(region, pitch, slots, [&](Id, std::uint64_t slot) { ++covered[slot]; });
    return covered;
}

// True if the new layout has a slot that only evictable blocks overlap.
bool Slabs::leaves_a_slot(const Region& region, std::uint64_t pitch, std::uint64_t slots) const {
    std::vector<bool> held(slots, false);
    each_overlap(region, pitch, slots, [&](Id id, std::uint64_t slot) {
        if (!records_[id].evictable()) held[slot] = true;
    });
    return std::find(held.begin(), held.end(), false) != held.end();
}

Id Slabs::evictable_in(const Slab& slab) const {
    for (Id id : slab.table)
        if (live(id) && records_[id].evictable()) return id;
    return none;
}

bool Slabs::any_evictable(const Slab& slab) const {
    if (evictable_in(slab) != none) return true;
    return std::any_of(slab.under.begin(), slab.under.end(),
                       [this](std::uint32_t old) { return evictable_in(*slabs_[old]) != none; });
}

void Slabs::lay(const Region& region, std::uint32_t in, std::uint32_t size_class,
                std::vector<std::uint32_t> covered) {
    Extent& extent = extents_[in];
    std::vector<std::uint32_t> under;
    std::uint64_t at = region.start;
    for (std::uint32_t number : region.slabs) {
        Slab& slab = *slabs_[number];
        if (at < slab.start) cut_run(in, at, slab.start - at);
        at = slab.start + slab.pages;
        extent.slabs.erase(slab.start);
        if (slab.free) unlink(number);
        classes_[slab.size_class].free -= slab.free;
        if (!slab.covered.empty()) std::erase(classes_[slab.size_class].reshaped, number);
        for (std::uint32_t old : slab.under) under.push_back(old);
        if (slab.used) {
            under.push_back(number);
            slab.free = 0;
            slab.covered = {};
            slab.under = {};
            for (Id& entry : slab.table)
                if (!live(entry)) entry = closed;
        } else {
            drop_slab(number);
        }
    }
    if (at < region.end) cut_run(in, at, region.end - at);

    std::uint32_t laid =
        make_slab(size_class, in, region.start, region.end - region.start, covered.size());
    Slab& slab = *slabs_[laid];
    slab.under = std::move(under);
    slab.covered = std::move(covered);
    for (std::uint32_t old : slab.under) slabs_[old]->over = laid;
    for (std::uint32_t slot = slab.slots(); slot-- > 0;)
        if (slab.covered[slot] == 0) push_free(laid, slot);
    classes_[size_class].reshaped.push_back(laid);
}

// A layout whose slots all overlap held blocks would gain nothing, and would hide vacant slots.
Laid Slabs::reshape(std::uint32_t number, std::uint32_t size_class) {
    if (slabs_[number]->exhausted_round == round_) return Laid::held;
    std::uint32_t in = slabs_[number]->extent;
    if (extents_[in].retired) return Laid::held;
    std::uint64_t pitch = classes_[size_class].pitch;
    Region region = region_of(number);
    widen(region, in, size_class);
    std::uint64_t slots = slots_in(region, pitch);
    if (slots == 0) return Laid::too_short;
    if (!leaves_a_slot(region, pitch, slots)) {
        for (std::uint32_t slab : region.slabs) slabs_[slab]->exhausted_round = round_;
        return Laid::held;
    }
    lay(region, in, size_class, cover(region, pitch, slots));
    return Laid::yes;
}

// Lays the class over this slab if that frees a slot at once.
bool Slabs::release_vacant(std::uint32_t number, std::uint32_t size_class) {
    std::uint64_t pitch = classes_[size_class].pitch;
    Region region = region_of(number);
    std::vector<std::uint32_t> covered = cover(region, pitch, slots_in(region, pitch));
    if (std::find(covered.begin(), covered.end(), 0U) == covered.end()) return false;
    lay(region, slabs_[number]->extent, size_class, std::move(covered));
    return true;
}

// Vacant slots in slabs of other classes are used first, because that evicts no block. In a slab
// with held blocks only, no victim would ever lead to the vacant slots.
void Slabs::reshape_vacant(std::uint32_t size_class, std::uint64_t n, bool thorough) {
    for (std::uint32_t other = 0; other < classes_.size(); ++other) {
        if (other == size_class) continue;
        std::uint32_t number = classes_[other].available;
        for (int asked = 0; number != none && (thorough || asked < donors_asked);) {
            if (room(size_class) >= n) return;
            const Slab& slab = *slabs_[number];
            std::uint32_t next = slab.next;
            bool may = slab.free * 2 >= slab.slots() || !any_evictable(slab);
            if (!may || !release_vacant(number, size_class)) ++asked;
            number = next;
        }
        std::vector<std::uint32_t> reshaped = classes_[other].reshaped;
        for (std::uint32_t slab : reshaped) {
            if (room(size_class) >= n) return;
            if (!any_evictable(*slabs_[slab])) release_vacant(slab, size_class);
        }
    }
}

// Finds a slot that can be freed, in address order, and returns the blocks that overlap it; none if
// laying the class over a slab freed one at once. Returns false if held blocks allow no slot.
bool Slabs::find_clearable(std::uint32_t size_class, std::vector<Id>& blocks) {
    blocks.clear();
    if (clearable(size_class, blocks)) return true;
    for (const Extent& extent : extents_) {
        for (auto [start, number] : extent.slabs) {
            Slab& slab = *slabs_[number];
            if (slab.exhausted_round == round_) continue;
            blocks.clear();
            if (slab.size_class != size_class) {
                std::uint64_t before = room(size_class);
                if (reshape(number, size_class) != Laid::yes) continue;
                // The lists of slabs have changed, so the search ends here in both cases.
                if (clearable(size_class, blocks)) return true;
                blocks.clear();
                return room(size_class) > before;
            }
            Id id = evictable_in(slab);
            if (id != none) {
                blocks.assign(1, id);
                return true;
            }
            slab.exhausted_round = round_;
        }
    }
    return false;
}

// Checks that all structures agree; for tests.
void Slabs::check(
    const std::function<std::pair<std::uint32_t, std::uint16_t>(Id)>& place_of) const {
    std::uint64_t live_bytes = 0, run_count = 0;
    std::vector<std::uint64_t> free(classes_.size(), 0), carve(classes_.size(), 0);
    for (std::uint32_t in = 0; in < extents_.size(); ++in) {
        const Extent& extent = extents_[in];
        if (extent.retired) {
            std::uint64_t left = 0;
            for (const auto& slab : slabs_)
                if (slab && slab->extent == in)
                    left += slab->used * classes_[slab->size_class].pitch;
            hold(extent.runs.empty() && extent.slabs.empty(), "a retired extent has free slots");
            hold(left == extent.left_bytes, "the count of bytes in a retired extent is wrong");
            continue;
        }
        std::map<std::uint64_t, std::pair<std::uint64_t, bool>> line;  // start -> pages, is a run
        for (auto [start, pages] : extent.runs) {
            hold(line.emplace(start, std::pair{pages, true}).second, "two runs start together");
            hold(sizes_.contains({pages, in, start}), "a run is not listed by its length");
            for (std::uint32_t c = 0; c < classes_.size(); ++c)
                carve[c] += carvable(classes_[c], pages);
        }
        run_count += extent.runs.size();
        std::map<std::uint64_t, std::uint64_t> blocks;  // of all layouts: first byte -> end
        auto note = [&](const Slab& slab) {
            std::uint64_t pitch = classes_[slab.size_class].pitch, used = 0;
            for (std::uint32_t slot = 0; slot < slab.slots(); ++slot) {
                Id id = slab.table[slot];
                if (!live(id)) continue;
                ++used;
                live_bytes += pitch;
                std::uint64_t first = first_byte(slab, slot);
                hold(blocks.emplace(first, first + pitch).second, "two live slots start together");
                hold(records_.known(id), "a slot has a block that does not exist");
                const auto [own_slab, own_slot] = place_of(id);
                hold(
                    own_slab < slabs_.size() && slabs_[own_slab].get() == &slab && own_slot == slot,
                    "a slot and its record disagree");
            }
            hold(used == slab.used, "a slab's count of blocks is wrong");
        };
        for (auto [start, number] : extent.slabs) {
            const Slab& slab = *slabs_[number];
            hold(slab.start == start && slab.extent == in && slab.over == none,
                 "a slab is not listed");
            hold(line.emplace(start, std::pair{slab.pages, false}).second, "slab and run collide");
            hold(slab.used || !slab.under.empty(), "an empty slab is kept");
            hold(slab.under.empty() == slab.covered.empty(),
                 "a slab without old blocks is still reshaping");
            note(slab);
            for (std::uint32_t old : slab.under) {
                hold(slabs_[old]->over == number && slabs_[old]->used, "an old slab is not listed");
                note(*slabs_[old]);
            }
            std::uint32_t listed = 0;
            for (Id slot = slab.free_head; slot != none; ++listed) {
                hold(!live(slab.table[slot]), "a free slot is live");
                Id next = slab.table[slot] & ~mark;
                slot = next == list_end ? none : next;
            }
            hold(listed == slab.free, "a slab's count of free slots is wrong");
            std::uint32_t closed_slots = 0;
            for (std::uint32_t slot = 0; slot < slab.slots() && !slab.covered.empty(); ++slot) {
                std::uint32_t count = 0;
                each_under(slab, slot, [&](std::uint32_t, std::uint32_t) { return ++count > 0; });
                hold(count == slab.covered[slot], "a slot's count of old blocks is wrong");
                hold(!count || slab.table[slot] == closed, "a covered slot is open");
                closed_slots += count > 0;
            }
            hold(slab.used + slab.free + closed_slots == slab.slots(), "a slot is not listed");
            free[slab.size_class] += slab.free;
        }
        std::uint64_t at = 0;
        bool was_run = false;
        for (auto [start, span] : line) {
            hold(start == at, "pages are missing or listed twice");
            hold(!(was_run && span.second), "two free runs were not joined");
            at = start + span.first;
            was_run = span.second;
        }
        hold(at == extent.pages, "pages are missing at the end");
        std::uint64_t end = 0;
        for (auto [first, last] : blocks) {
            hold(first >= end, "two live slots overlap");
            end = last;
        }
    }
    hold(run_count == sizes_.size(), "a run is listed twice");
    hold(live_bytes == live_bytes_, "the count of live bytes is wrong");
    for (std::uint32_t c = 0; c < classes_.size(); ++c)
        hold(free[c] == classes_[c].free &&
                 (carve[c] == classes_[c].carvable || !classes_[c].lives()),
             "the count of free slots is wrong");
}

}  // namespace kvtier
