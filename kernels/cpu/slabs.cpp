// Free runs and slabs: carves slabs, gives and takes slots, changes generations. See reshape.cpp.
#include "slabs.h"

#include <algorithm>
#include <atomic>
#include <iterator>

namespace kvtier {
namespace {

constexpr std::uint64_t small_slab_bytes = std::uint64_t{4} << 20;
constexpr std::uint64_t large_slab_bytes = std::uint64_t{64} << 20;
constexpr std::uint64_t few_slots = 16;

std::uint64_t round_up(std::uint64_t n, std::uint64_t unit) { return (n + unit - 1) / unit * unit; }
std::uint64_t pages_for(std::uint64_t bytes) { return (bytes + page_bytes - 1) / page_bytes; }

}  // namespace

// Whole pages: a page has one generation, and disks read and write whole pages.
std::uint64_t Slabs::pitch_for(std::uint64_t block_bytes) {
    return round_up(block_bytes, page_bytes);
}

std::uint32_t Slabs::join_class(std::uint64_t block_bytes) {
    std::uint64_t pitch = pitch_for(block_bytes);
    auto number = static_cast<std::uint32_t>(classes_.size());
    for (std::uint32_t i = 0; i < classes_.size(); ++i) {
        if (!classes_[i].lives()) {
            number = std::min(number, i);
        } else if (classes_[i].pitch == pitch) {
            ++classes_[i].users;
            return i;
        }
    }
    Class made{};
    made.users = 1;
    made.pitch = pitch;
    // About 16 slots, within 4 to 64 MiB, and at least one.
    std::uint64_t bytes = std::clamp(few_slots * pitch, small_slab_bytes, large_slab_bytes);
    made.slab_slots = std::max<std::uint64_t>(1, bytes / pitch);
    made.slab_pages = pages_for(made.slab_slots * pitch);
    for (const auto& [pages, extent, start] : sizes_) made.carvable += carvable(made, pages);
    if (number == classes_.size()) classes_.emplace_back();
    classes_[number] = std::move(made);
    return number;
}

std::uint32_t Slabs::add_extent(std::uint64_t bytes, std::uint64_t* generations, SlotNote* notes) {
    std::uint64_t pages = bytes / page_bytes;
    for (std::uint64_t i = 0; i < pages; ++i)
        if (generations[i] == 0) generations[i] = 1;
    extents_.push_back({.pages = pages, .generations = generations, .notes = notes});
    auto index = static_cast<std::uint32_t>(extents_.size() - 1);
    capacity_pages_ += pages;
    add_run(index, 0, pages);
    return index;
}

// ---- free runs ----

// The number of slots that `carve` gets out of a run, slab by slab.
std::uint64_t Slabs::carvable(const Class& size_class, std::uint64_t pages) const {
    return pages / size_class.slab_pages * size_class.slab_slots +
           pages % size_class.slab_pages * page_bytes / size_class.pitch;
}

void Slabs::put_run(std::uint32_t extent, std::uint64_t start, std::uint64_t pages) {
    extents_[extent].runs.emplace(start, pages);
    sizes_.emplace(pages, extent, start);
    for (Class& size_class : classes_)
        if (size_class.lives()) size_class.carvable += carvable(size_class, pages);
}

void Slabs::cut_run(std::uint32_t extent, std::uint64_t start, std::uint64_t pages) {
    extents_[extent].runs.erase(start);
    sizes_.erase({pages, extent, start});
    for (Class& size_class : classes_)
        if (size_class.lives()) size_class.carvable -= carvable(size_class, pages);
}

void Slabs::add_run(std::uint32_t extent, std::uint64_t start, std::uint64_t pages) {
    if (pages == 0) return;
    auto& runs = extents_[extent].runs;
    auto after = runs.lower_bound(start);
    if (after != runs.begin()) {
        auto [left, length] = *std::prev(after);
        if (left + length == start) {
            cut_run(extent, left, length);
            start = left;
            pages += length;
        }
    }
    after = runs.find(start + pages);
    if (after != runs.end()) {
        std::uint64_t length = after->second;
        cut_run(extent, start + pages, length);
        pages += length;
    }
    put_run(extent, start, pages);
}

// ---- slabs ----

std::uint32_t Slabs::make_slab(std::uint32_t size_class, std::uint32_t extent, std::uint64_t start,
                               std::uint64_t pages, std::uint64_t slots) {
    std::uint32_t number;
    if (spare_.empty()) {
        number = static_cast<std::uint32_t>(slabs_.size());
        slabs_.emplace_back();
    } else {
        number = spare_.back();
        spare_.pop_back();
    }
    slabs_[number] = std::make_unique<Slab>();
    Slab& slab = *slabs_[number];
    slab.size_class = size_class;
    slab.extent = extent;
    slab.start = start;
    slab.pages = pages;
    slab.table.assign(slots, closed);
    ++classes_[size_class].slabs;
    extents_[extent].slabs.emplace(start, number);
    return number;
}

void Slabs::drop_slab(std::uint32_t number) {
    --classes_[slabs_[number]->size_class].slabs;
    slabs_[number].reset();
    spare_.push_back(number);
}

// Adds the slab to those of its class with free slots; the last one to get a slot comes first.
void Slabs::link(std::uint32_t number) {
    Slab& slab = *slabs_[number];
    Class& size_class = classes_[slab.size_class];
    slab.prev = none;
    slab.next = size_class.available;
    if (slab.next != none) slabs_[slab.next]->prev = number;
    size_class.available = number;
}

void Slabs::unlink(std::uint32_t number) {
    Slab& slab = *slabs_[number];
    if (slab.next != none) slabs_[slab.next]->prev = slab.prev;
    if (slab.prev != none)
        slabs_[slab.prev]->next = slab.next;
    else
        classes_[slab.size_class].available = slab.next;
}

void Slabs::push_free(std::uint32_t number, std::uint32_t slot) {
    Slab& slab = *slabs_[number];
    slab.table[slot] = mark | (slab.free_head == none ? list_end : slab.free_head);
    slab.free_head = slot;
    ++classes_[slab.size_class].free;
    if (slab.free++ == 0) link(number);
}

// Makes a slab of the shortest free run that holds a whole one, or else of the longest run.
void Slabs::carve(std::uint32_t size_class) {
    const Class& wanted = classes_[size_class];
    auto found = sizes_.lower_bound({wanted.slab_pages, 0, 0});
    if (found == sizes_.end()) --found;
    auto [length, extent, start] = *found;
    std::uint64_t slots = std::min(wanted.slab_slots, length * page_bytes / wanted.pitch);
    std::uint64_t pages = pages_for(slots * wanted.pitch);
    cut_run(extent, start, length);
    if (length > pages) put_run(extent, start + pages, length - pages);
    std::uint32_t number = make_slab(size_class, extent, start, pages, slots);
    for (std::uint64_t slot = slots; slot-- > 0;)
        push_free(number, static_cast<std::uint32_t>(slot));
}

void Slabs::dissolve(std::uint32_t number) {
    Slab& slab = *slabs_[number];
    if (slab.free) unlink(number);
    classes_[slab.size_class].free -= slab.free;
    extents_[slab.extent].slabs.erase(slab.start);
    add_run(slab.extent, slab.start, slab.pages);
    drop_slab(number);
}

// Ends a reshaping whose last old block left, and removes an empty slab.
void Slabs::settle(std::uint32_t number) {
    Slab& slab = *slabs_[number];
    if (!slab.under.empty()) return;
    Class& size_class = classes_[slab.size_class];
    if (!slab.covered.empty()) {
        std::erase(size_class.reshaped, number);
        slab.covered = {};
        std::uint64_t pages = pages_for(slab.slots() * size_class.pitch);
        std::uint64_t rest = slab.pages - pages;
        slab.pages = pages;
        if (rest && slab.used) add_run(slab.extent, slab.start + pages, rest);
        if (!slab.used) slab.pages += rest;
    }
    if (slab.used == 0) dissolve(number);
}

std::pair<std::uint32_t, std::uint16_t> Slabs::take(std::uint32_t size_class, Id id) {
    if (classes_[size_class].available == none) carve(size_class);
    const std::uint32_t number = classes_[size_class].available;
    Slab& slab = *slabs_[number];
    const auto slot = static_cast<std::uint16_t>(slab.free_head);
    Id next = slab.table[slot] & ~mark;
    slab.free_head = next == list_end ? none : next;
    slab.table[slot] = id;
    ++slab.used;
    --classes_[size_class].free;
    if (--slab.free == 0) unlink(number);
    live_bytes_ += classes_[size_class].pitch;
    return {number, slot};
}

void Slabs::release(std::uint32_t number, std::uint16_t slot) {
    Slab& slab = *slabs_[number];
    std::uint64_t pitch = classes_[slab.size_class].pitch, first = first_byte(slab, slot);
    std::atomic_ref<std::uint64_t>(extents_[slab.extent].generations[first / page_bytes])
        .fetch_add(1, std::memory_order_release);
    --slab.used;
    if (Extent& extent = extents_[slab.extent]; extent.retired) {
        slab.table[slot] = closed;
        if ((extent.left_bytes -= pitch) == 0) drop_slabs(slab.extent);
        return;
    }
    live_bytes_ -= pitch;
    if (slab.over == none) {
        push_free(number, slot);
        if (slab.used == 0) settle(number);
        return;
    }
    slab.table[slot] = closed;
    std::uint32_t over = slab.over;
    if (slab.used == 0) {
        std::erase(slabs_[over]->under, number);
        drop_slab(number);
    }
    uncover(over, first, first + pitch);
    settle(over);
}

// Slots that are not live count neither as free nor as covered from now on.
void Slabs::retire(std::uint32_t number) {
    Extent& extent = extents_[number];
    if (extent.retired) return;
    while (!extent.runs.empty())
        cut_run(number, extent.runs.begin()->first, extent.runs.begin()->second);
    for (auto [start, uppermost] : extent.slabs) {
        Slab& slab = *slabs_[uppermost];
        Class& size_class = classes_[slab.size_class];
        if (slab.free) unlink(uppermost);
        size_class.free -= slab.free;
        slab.free = 0;
        std::erase(size_class.reshaped, uppermost);
        for (Id& entry : slab.table)
            if (!live(entry)) entry = closed;
    }
    extent.slabs.clear();
    extent.retired = true;
    for (const auto& slab : slabs_)
        if (slab && slab->extent == number)
            extent.left_bytes += slab->used * classes_[slab->size_class].pitch;
    capacity_pages_ -= extent.pages;
    live_bytes_ -= extent.left_bytes;
    if (!extent.left_bytes) drop_slabs(number);
}

void Slabs::drop_slabs(std::uint32_t extent) {
    for (std::uint32_t number = 0; number < slabs_.size(); ++number)
        if (slabs_[number] && slabs_[number]->extent == extent) drop_slab(number);
}

SlotAddress Slabs::address(std::uint32_t number, std::uint16_t slot) const {
    const Slab& slab = *slabs_[number];
    std::uint64_t first = first_byte(slab, slot);
    std::uint64_t& entry = extents_[slab.extent].generations[first / page_bytes];
    return {slab.extent, 0, first,
            std::atomic_ref<std::uint64_t>(entry).load(std::memory_order_relaxed)};
}

Id Slabs::at(const SlotAddress& slot) const {
    if (slot.extent >= extents_.size()) return none;
    const Extent& extent = extents_[slot.extent];
    const std::uint64_t page = slot.offset / page_bytes;
    auto after = extent.slabs.upper_bound(page);
    if (after == extent.slabs.begin() || page >= extent.pages) return none;
    auto in = [&](const Slab& slab) {
        const std::uint64_t first = slab.start * page_bytes;
        const std::uint64_t pitch = classes_[slab.size_class].pitch;
        if (slot.offset < first || (slot.offset - first) % pitch) return none;
        const std::uint64_t number = (slot.offset - first) / pitch;
        if (number >= slab.slots() || !live(slab.table[number])) return none;
        return slab.table[number];
    };
    const Slab& uppermost = *slabs_[std::prev(after)->second];
    Id found = in(uppermost);
    for (std::size_t i = 0; found == none && i < uppermost.under.size(); ++i)
        found = in(*slabs_[uppermost.under[i]]);
    const auto generation =
        std::atomic_ref<std::uint64_t>(extent.generations[page]).load(std::memory_order_relaxed);
    return generation == slot.generation ? found : none;
}

SlotNote* Slabs::note(std::uint32_t number, std::uint16_t slot) const {
    const Slab& slab = *slabs_[number];
    SlotNote* notes = extents_[slab.extent].notes;
    return notes ? notes + first_byte(slab, slot) / page_bytes : nullptr;
}

// ---- slots known from notes ----

bool Slabs::is_current(std::uint32_t extent, std::uint64_t page) const {
    return extents_[extent].notes[page].generation == extents_[extent].generations[page];
}

// Makes the note of a slot that is not taken over invalid, and its readers notice.
void Slabs::outdate(std::uint32_t extent, std::uint64_t page) {
    std::atomic_ref<std::uint64_t>(extents_[extent].generations[page])
        .fetch_add(1, std::memory_order_release);
}

void Slabs::lay(std::uint32_t extent, std::vector<Known>& slots) {
    for (std::size_t first = 0, end; first < slots.size(); first = end) {
        std::uint32_t size_class = slots[first].size_class;
        std::uint64_t pitch = pages_of(size_class), start = slots[first].page, last = 0;
        for (end = first; end < slots.size() && slots[end].size_class == size_class; ++end) {
            std::uint64_t at = slots[end].page - start;
            if (at % pitch || at / pitch >= classes_[size_class].slab_slots) break;
            last = at / pitch;
            slots[end].slot = static_cast<std::uint16_t>(last);
        }
        std::uint64_t pages = (last + 1) * pitch;
        auto run = std::prev(extents_[extent].runs.upper_bound(start));
        auto [left, length] = *run;
        cut_run(extent, left, length);
        if (start > left) put_run(extent, left, start - left);
        if (left + length > start + pages)
            put_run(extent, start + pages, left + length - start - pages);
        std::uint32_t number = make_slab(size_class, extent, start, pages, last + 1);
        for (std::size_t i = first; i < end; ++i) slots[i].slab = number;
    }
}

void Slabs::put(const Known& known, Id id) {
    Slab& slab = *slabs_[known.slab];
    slab.table[known.slot] = id;
    ++slab.used;
    live_bytes_ += classes_[slab.size_class].pitch;
}

void Slabs::open(const std::vector<Known>& slots) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (i && slots[i].slab == slots[i - 1].slab) continue;
        Slab& slab = *slabs_[slots[i].slab];
        for (std::uint32_t slot = slab.slots(); slot-- > 0;)
            if (slab.table[slot] == closed) push_free(slots[i].slab, slot);
        if (slab.used == 0) settle(slots[i].slab);
    }
}

std::size_t Slabs::memory_bytes() const {
    constexpr std::size_t map_node = 64, set_node = 64;
    std::size_t total = slabs_.capacity() * sizeof(void*) + spare_.capacity() * 4 +
                        classes_.capacity() * sizeof(Class) + sizes_.size() * set_node;
    for (const auto& slab : slabs_)
        if (slab)
            total +=
                sizeof(Slab) + 16 +
                4 * (slab->table.capacity() + slab->covered.capacity() + slab->under.capacity());
    for (const Extent& extent : extents_)
        total += sizeof(Extent) + map_node * (extent.runs.size() + extent.slabs.size());
    return total;
}

}  // namespace kvtier
