// The store's calls: queries, plans, events of blocks. Those of lower tiers are in tiers.cpp.
#include "store.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <stdexcept>
#include <unordered_set>

#include "make_room.h"

namespace kvtier {
namespace {

constexpr std::uint64_t max_places = 1U << 21;  // a record has 21 bits for its place
constexpr std::size_t max_sizes = 1024;         // each costs a little when a free run changes
constexpr std::array<char, Counts::states> answer{0, 2, 1, 3, 2, 1};    // to a probe, by state
constexpr char leaving = 3;                                             // of these answers
constexpr std::array<char, Counts::states> detailed{0, 2, 1, 3, 2, 6};  // to `states`
constexpr char detailed_below = 16;  // to `states`: this plus the tier, if it is only there

// True if no id occurs twice. The blocks of a chain were mostly created in sequence, so most
// batches only ascend or only descend.
bool all_distinct(Ids ids) {
    auto up = std::adjacent_find(ids.begin(), ids.end(), std::greater_equal<>());
    if (up == ids.end()) return true;
    if (std::adjacent_find(ids.begin(), ids.end(), std::less_equal<>()) == ids.end()) return true;
    IdList sorted(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());
    return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

// Keeps only the first occurrence of each id.
void remove_duplicates(IdList& ids) {
    if (all_distinct(ids)) return;
    std::unordered_set<Id> seen;
    std::erase_if(ids, [&](Id id) { return !seen.insert(id).second; });
}

}  // namespace

std::uint32_t Store::add_space(std::vector<GroupSpec> groups, std::uint32_t name) {
    need(!groups.empty(), "a space needs a group");
    Space space;
    std::uint64_t count = 0;
    for (const GroupSpec& group : groups) {
        need(group.kind <= Kind::state, "a group's kind is 0, 1 or 2");
        need(group.kind != Kind::window || group.window_blocks > 0, "a window needs a length");
        need(group.block_bytes > 0 && group.block_bytes <= std::uint64_t{1} << 40,
             "a block has between 1 byte and 1 TiB");
        need(group.shards > 0, "a group needs a shard");
        count += group.shards;
    }
    need(count <= max_places, "too many spaces, groups and shards");
    space.places = static_cast<std::uint32_t>(count);
    space.name = name;
    std::uint32_t at = make_places(space.places);
    std::vector<std::uint32_t> classes;
    for (const GroupSpec& group : groups) classes.push_back(slabs_.join_class(group.block_bytes));
    if (slabs_.living_classes() > max_sizes) {
        for (std::uint32_t joined : classes) slabs_.leave_class(joined);
        spare_places_[order_of(space.places)].push_back(at);
        throw std::invalid_argument("too many block sizes");
    }
    auto number = static_cast<std::uint32_t>(spaces_.size());
    if (spare_spaces_.empty()) {
        spaces_.emplace_back();
    } else {
        number = spare_spaces_.back();
        spare_spaces_.pop_back();
    }
    for (std::uint32_t g = 0; g < groups.size(); ++g) {
        const GroupSpec& group = groups[g];
        space.first_place.push_back(at);
        bool full = group.kind == Kind::full;
        for (std::uint32_t shard = 0; shard < group.shards; ++shard)
            places_[at++] = {number, g, shard, classes[g], group.block_bytes, full};
        if (full) space.full_places += group.shards;
    }
    space.plain = groups.size() == 1 && groups[0].kind == Kind::full && groups[0].shards == 1;
    space.groups = std::move(groups);
    spaces_[number] = std::move(space);
    return number;
}

// Allocates a run of places, rounded up to a power of two so that later spaces can reuse runs.
std::uint32_t Store::make_places(std::uint32_t n) {
    std::vector<std::uint32_t>& spare = spare_places_[order_of(n)];
    if (!spare.empty()) {
        std::uint32_t at = spare.back();
        spare.pop_back();
        return at;
    }
    std::size_t at = places_.size(), end = at + (std::size_t{1} << order_of(n));
    need(end <= max_places, "too many spaces, groups and shards");
    places_.resize(end);
    return static_cast<std::uint32_t>(at);
}

bool Store::drop_space(std::uint32_t number) {
    begin();
    const Space& gone = space(number);
    if (gone.nodes) return false;
    for (std::uint32_t first : gone.first_place) slabs_.leave_class(places_[first].size_class);
    spare_places_[order_of(gone.places)].push_back(gone.first_place[0]);
    spaces_[number] = Space{};
    spare_spaces_.push_back(number);
    return true;
}

const Space& Store::space(std::uint32_t space) const {
    if (space >= spaces_.size() || spaces_[space].groups.empty())
        throw std::out_of_range("no such space");
    return spaces_[space];
}

std::uint32_t Store::place(std::uint32_t in, std::uint32_t group, std::uint32_t shard) const {
    const Space& found = space(in);
    if (group >= found.groups.size()) throw std::out_of_range("no such group");
    if (shard >= found.groups[group].shards) throw std::out_of_range("no such shard");
    return found.first_place[group] + shard;
}

const Record& Store::block(Id id) const {
    need(records_.known(id) && records_[id].is() != State::absent, "no block has this id");
    return records_[id];
}

SlotAddress Store::slot(Id id) const {
    const Record& record = block(id);
    need(record.slab != no_slab, "a block below memory has no slot");
    return slabs_.address(record.slab, record.slot);
}

// ---- queries ----

// Calls visit(i, node) for each key until it returns false.
//
// Prefetches lines of the index two steps ahead, and records one step ahead. The blocks of a chain
// were mostly created in sequence, so their records are mostly adjacent: after a few adjacent ones,
// tries the next record first, and skips the index until that fails.
template <class Visit>
void Store::each_node(std::uint32_t space, Keys keys, Visit visit) const {
    constexpr std::size_t step = 24, ring = 64, few = 8;
    std::array<std::uint64_t, ring> hashes;
    auto prefetch_step = [&](std::size_t i) {
        if (i >= keys.n) return;
        hashes[i % ring] = index_.hash(space, keys[i]);
        index_.prefetch(hashes[i % ring]);
    };
    auto guess = [&](std::size_t i) {
        if (i < keys.n) index_.prefetch_records(hashes[i % ring]);
    };
    auto start = [&](std::size_t i) {
        for (std::size_t j = i; j < i + 2 * step; ++j) prefetch_step(j);
        for (std::size_t j = i; j < i + step; ++j) guess(j);
    };
    Id last = none, stride = 1;
    std::size_t neighbours = 0;
    start(0);
    for (std::size_t i = 0; i < keys.n; ++i) {
        Id node = none;
        if (neighbours >= few) {
            prefetch(last + stride * static_cast<Id>(step));
            Id next = last + stride;
            if (next < records_.limit() && is_node(next, space, keys[i])) {
                node = next;
            } else {
                neighbours = 0;
                start(i);
            }
        }
        if (node == none) {
            prefetch_step(i + 2 * step);
            guess(i + step);
            node = find(space, keys[i], hashes[i % ring]);
            if (node != none && last != none && (node == last + 1 || node == last - 1)) {
                neighbours = node - last == stride ? neighbours + 1 : 1;
                stride = node - last;
            } else {
                neighbours = 0;
            }
        }
        last = node;
        if (!visit(i, node)) return;
    }
}

Id Store::residency(Id node, std::uint32_t place) const {
    for (Id id = node; id != none; id = records_[id].more)
        if (records_[id].place == place && records_[id].is() != State::absent) return id;
    return none;
}

Id Store::ready_at(Id node, std::uint32_t place) const {
    Id id = residency(node, place);
    return id != none && records_[id].in_memory() ? id : none;
}

// Returns the leading blocks of a plain space that are in memory, as far as their records are
// adjacent, which those of one save mostly are: a few instructions a block, without the index.
IdList Store::adjacent_in_memory(std::uint32_t in, Keys keys) {
    constexpr Id ahead = 24;
    IdList ids;
    if (keys.n < 2) return ids;
    const std::uint32_t place = spaces_[in].first_place[0];
    auto is_next = [&](Id id, std::size_t i) {
        if (id >= records_.limit()) return false;
        const Record& record = records_[id];
        return record.place == place && record.in_memory() && !record.further &&
               record.key == keys[i];
    };
    const Id first = find(in, keys[0]);
    if (first == none || !is_next(first, 0)) return ids;
    const Id stride = is_next(first + 1, 1) ? 1 : -1;
    ids.resize(keys.n);
    std::size_t run = 0;
    for (Id id = first; run < keys.n && is_next(id, run); id += stride) {
        prefetch(id + stride * ahead);
        use(id);
        ids[run++] = id;
    }
    ids.resize(run);
    return ids;
}

// One walk: reads each record once, for any number of groups and shards.
Match Store::match(std::uint32_t in, Keys keys) {
    const Space& found = space(in);
    Match best;
    if (found.plain) {
        Part all{0, 0, 0, adjacent_in_memory(in, keys)};
        const std::size_t run = best.restorable = all.ids.size();
        all.ids.reserve(keys.n);
        each_node(in, keys.from(run), [&](std::size_t, Id node) {
            if (node == none) return false;
            if (records_[node].in_memory() && all.ids.size() == best.restorable)
                all.ids.push_back(node);
            else if (!restorable(records_[node].is()))
                return false;
            use(node);
            ++best.restorable;
            return true;
        });
        best.ready = all.ids.size();
        if (best.ready) best.parts.push_back(std::move(all));
        return best;
    }
    IdList ids;  // a row of places per key
    std::vector<std::uint32_t> ready(found.groups.size()), here(found.groups.size());
    // The number of consecutive blocks in memory up to this one; and of those in any tier.
    std::vector<std::size_t> ready_run(found.groups.size(), 0), run(found.groups.size(), 0);
    bool gap = false;  // in the blocks in memory of a full group
    each_node(in, keys, [&](std::size_t i, Id node) {
        std::fill(ready.begin(), ready.end(), 0);
        std::fill(here.begin(), here.end(), 0);
        ids.resize((i + 1) * found.places, none);
        for (Id id = node; id != none; id = records_[id].more) {
            if (!restorable(records_[id].is())) continue;
            std::uint32_t place = records_[id].place;
            ids[i * found.places + place - found.first_place[0]] = id;
            ++here[places_[place].group];
            ready[places_[place].group] += records_[id].in_memory();
        }
        bool all_here = true, all_ready = true;
        for (std::size_t g = 0; g < found.groups.size(); ++g) {
            const GroupSpec& group = found.groups[g];
            run[g] = here[g] == group.shards ? run[g] + 1 : 0;
            ready_run[g] = ready[g] == group.shards ? ready_run[g] + 1 : 0;
            std::size_t needed = 1;
            if (group.kind == Kind::full) {
                if (!run[g]) return false;
                gap |= !ready_run[g];
            } else if (group.kind == Kind::window) {
                needed = std::min<std::size_t>(group.window_blocks, i + 1);
            }
            all_here &= run[g] >= needed;
            all_ready &= ready_run[g] >= needed;
        }
        if (all_here) best.restorable = i + 1;
        if (all_ready && !gap) best.ready = i + 1;
        return true;
    });
    for (std::uint32_t p = 0; p < found.places; ++p) {
        const Place& place = places_[found.first_place[0] + p];
        const GroupSpec& group = found.groups[place.group];
        for (std::size_t prefix : {best.ready, best.restorable})
            for (std::size_t i = first_needed(group, prefix); i < prefix; ++i)
                use(ids[i * found.places + p]);
        if (!best.ready) continue;
        Part part{place.group, place.shard, first_needed(group, best.ready), {}};
        part.ids.reserve(best.ready - part.first);
        for (std::size_t i = part.first; i < best.ready; ++i)
            part.ids.push_back(ids[i * found.places + p]);
        best.parts.push_back(std::move(part));
    }
    return best;
}

std::vector<Missing> Store::missing(std::uint32_t in, Keys keys, std::size_t prefix) const {
    const Space& found = space(in);
    need(prefix <= keys.n, "the prefix is longer than the keys");
    std::vector<Missing> missing(found.places);
    for (std::uint32_t p = 0; p < found.places; ++p) {
        const Place& place = places_[found.first_place[0] + p];
        missing[p].group = place.group;
        missing[p].shard = place.shard;
    }
    each_node(in, {keys.bytes, prefix}, [&](std::size_t i, Id node) {
        for (Id id = node; id != none; id = records_[id].more) {
            const Record& record = records_[id];
            const bool below = record.tier != memory;
            if (!below && record.is() != State::promoting) continue;
            Missing& part = missing[record.place - found.first_place[0]];
            if (i < first_needed(found.groups[part.group], prefix)) continue;
            (below ? part.below : part.promoting).push_back(id);
        }
        return true;
    });
    for (Missing& part : missing) {
        remove_duplicates(part.below);
        remove_duplicates(part.promoting);
    }
    std::erase_if(missing,
                  [](const Missing& part) { return part.below.empty() && part.promoting.empty(); });
    return missing;
}

// The blocks of all places for these keys, each once.
IdList Store::resident(std::uint32_t in, Keys keys) const {
    space(in);
    IdList nodes, ids;
    each_node(in, keys, [&](std::size_t, Id node) {
        if (node != none) nodes.push_back(node);
        return true;
    });
    remove_duplicates(nodes);
    for (Id node : nodes)
        for (Id id = node; id != none; id = records_[id].more)
            if (restorable(records_[id].is())) ids.push_back(id);
    return ids;
}

void Store::states(std::uint32_t in, Key key, char* answers) const {
    const Space& found = space(in);
    std::fill_n(answers, found.places, detailed[0]);
    for (Id id = find(in, key); id != none; id = records_[id].more) {
        const Record& record = records_[id];
        if (record.is() != State::absent)
            answers[record.place - found.first_place[0]] =
                record.tier == memory ? detailed[record.state]
                                      : static_cast<char>(detailed_below + record.tier);
    }
}

// True if no key occurs twice. Compares hashes, because new keys have no order.
bool Store::distinct(std::uint32_t space, Keys keys) const {
    std::size_t mask = std::bit_ceil(2 * keys.n + 1) - 1;
    std::vector<std::uint32_t> seen(mask + 1, none);
    for (std::uint32_t i = 0; i < keys.n; ++i) {
        Key key = keys[i];
        std::size_t at = index_.hash(space, key) & mask;
        for (; seen[at] != none; at = (at + 1) & mask)
            if (keys[seen[at]] == key) return false;
        seen[at] = i;
    }
    return true;
}

void Store::probe(std::uint32_t place, Keys keys, char* answers, bool live) const {
    need(distinct(places_[place].space, keys), "a key is given twice");
    each_node(places_[place].space, keys, [&](std::size_t i, Id node) {
        Id id = residency(node, place);
        answers[i] = id == none ? 0 : answer[records_[id].state];
        if (live && id != none && records_[id].is() == State::quarantined) answers[i] = leaving;
        return true;
    });
}

IdList Store::present(std::uint32_t place, Keys keys) const {
    IdList ids;
    each_node(places_[place].space, keys, [&](std::size_t, Id node) {
        Id id = ready_at(node, place);
        if (id != none) ids.push_back(id);
        return true;
    });
    return ids;
}

IdList Store::ancestors(std::uint32_t place, Key key, std::size_t limit) const {
    IdList ids;
    for (Id node = find(places_[place].space, key); node != none && limit-- > 0;
         node = records_[node].parent) {
        Id id = ready_at(node, place);
        if (id != none) ids.push_back(id);
    }
    return ids;
}

// ---- plans ----

std::uint64_t Store::room(std::uint32_t space, std::uint32_t group) const {
    return slabs_.room(places_[place(space, group, 0)].size_class);
}

void Store::evict_one(Id id, Left& left) {
    left.gone.push_back(id);
    if (recording_evicted_) {
        const Place& from = place_of(id);
        evicted_.push_back({from.space, from.group, from.shard, key_of(id)});
    }
    if (records_[id].framed) {
        records_[id].become(after(Event::evict_framed));
        free_slot(id, State::ready);
        left.below.push_back(id);
    } else {
        records_[id].become(after(Event::evict));
        leave(id, State::ready, &left.orphans);
    }
}

IdList Store::ready_in_retired() const {
    IdList ids;
    slabs_.each_retired([&](Id id) {
        if (records_[id].is() == State::ready) ids.push_back(id);
    });
    return ids;
}

Left Store::leave_retired(bool unframed, std::size_t limit) {
    Left left;
    begin();
    for (Id id : ready_in_retired())
        if (left.gone.size() < limit && records_[id].evictable() &&
            (unframed || records_[id].framed))
            evict_one(id, left);
    keep_orphans(left.orphans);
    return left;
}

Left Store::make_room(std::uint32_t space, std::uint32_t group, std::uint64_t n, Ids victims) {
    std::uint32_t wanted = places_[place(space, group, 0)].size_class;
    for (Id id : victims) need(records_.known(id), "no block has this id");
    Left left;
    begin();
    make_room_in(
        slabs_, records_, wanted, n, victims, [this](Id id) { return records_[id].slab; },
        [&](Id id) { evict_one(id, left); });
    keep_orphans(left.orphans);
    return left;
}

void Store::note_evicted(bool on) {
    recording_evicted_ = on;
    evicted_.clear();
}

IdList Store::reserve(std::uint32_t place, std::optional<Key> parent, Keys keys,
                      const char* statuses, std::uint32_t owner, std::uint64_t expires_ms) {
    std::uint32_t space = places_[place].space, size_class = places_[place].size_class;
    IdList ids;
    begin();
    Id last = none;  // the node of the previous key, once known
    auto is_root = [&](std::size_t i) { return i == 0 && !parent; };
    auto parent_node = [&](std::size_t i, bool make) {
        if (last != none) return last;
        if (is_root(i)) return none;
        Key key = i == 0 ? *parent : keys[i - 1];
        std::uint64_t hash = index_.hash(space, key);
        Id node = find(space, key, hash);
        return node == none && make ? make_node(space, key, hash) : node;
    };
    bool twice = false;
    each_node(space, keys, [&](std::size_t i, Id node) {
        if (statuses[i]) {
            if (node != none && records_[node].loose) {
                Id above = parent_node(i, false);
                if (above != none || is_root(i)) set_parent(node, above);
            }
            last = node;
            return true;
        }
        if (node != none && residency(node, place) != none) {
            twice = true;
            return false;
        }
        if (slabs_.room(size_class) == 0) return false;
        Id above = parent_node(i, true);
        Key key = keys[i];
        std::uint64_t hash = index_.hash(space, key);
        node = find(space, key, hash);
        if (node == none) node = make_node(space, key, hash);
        set_parent(node, above);
        Id id = attach(node, place, Event::reserve);
        take_slot(id);
        note_writing(id, Noted::writing, owner, expires_ms);
        if (above != none) drop_idle(above);
        ids.push_back(id);
        last = node;
        return true;
    });
    if (twice) {
        abort(ids);
        throw std::invalid_argument("a key to reserve exists already, or is given twice");
    }
    return ids;
}

// ---- events ----

// Moves the whole batch to the event's next state, or none of it. A block that is being read leaves
// at the end of the read, not at the end of a process.
void Store::transition(Ids ids, Event event) {
    State from = before(event), to = after(event);
    change(ids, [=](const Record& record) {
        bool may = record.is() == from && !(from == State::quarantined && record.filling);
        return may ? to : State::unused;
    });
}

void Store::tally(Id id, Status from, Status to) {
    std::uint64_t bytes = places_[records_[id].place].block_bytes;
    std::size_t a = Counts::at(from), b = Counts::at(to);
    if (from.state != State::absent) --counts_.blocks[a], counts_.bytes[a] -= bytes;
    if (to.state != State::absent) ++counts_.blocks[b], counts_.bytes[b] += bytes;
}

// Gives the node a new block of this place: in its own record if that is vacant.
Id Store::attach(Id node, std::uint32_t place, Event event, std::uint32_t tier) {
    if (records_[node].ghost()) --counts_.ghosts;
    Id id = node;
    if (records_[node].is() != State::absent) {
        id = records_.make();
        records_[id].further = 1;
        records_[id].parent = records_[id].prev_sibling = node;
        records_[id].more = records_[node].more;
        if (records_[id].more != none) records_[records_[id].more].prev_sibling = id;
        records_[node].more = id;
    }
    records_[id].place = place;
    records_[id].become(after(event));
    records_[id].tier = tier;
    tally(id, State::absent, {after(event), tier});
    return id;
}

// Removes the record of an ABSENT block, and its node if that is unused.
void Store::detach(Id id) {
    Record& record = records_[id];
    Id node = records_.node_of(id);
    record.slab = no_slab;
    record.tier = memory;
    records_.drop_frame(id);
    record.summed = record.filling = record.lossy = 0;
    if (record.further) {
        records_[record.prev_sibling].more = record.more;
        if (record.more != none) records_[record.more].prev_sibling = record.prev_sibling;
        records_.drop(id);
    }
    if (!records_[node].ghost()) return;
    ++counts_.ghosts;
    drop_idle(node);
}

// Frees the slot of a block, and those of its copies.
void Store::vacate(Id id) {
    slabs_.release(records_[id].slab, records_[id].slot);
    for (auto& [number, copies] : hot_) copies->drop(id);
}

// A block that is already ABSENT leaves its place, and returns its record.
void Store::leave(Id id, State from, IdList* orphans) {
    Record& record = records_[id];
    tally(id, {from, record.tier}, State::absent);
    if (restorable(from) && places_[record.place].full) cut_below(records_.node_of(id), orphans);
    if (record.slab != no_slab) vacate(id);
    detach(id);
}

// False if there is no room.
bool Store::take_slot(Id id) {
    Record& record = records_[id];
    const std::uint32_t size_class = places_[record.place].size_class;
    if (slabs_.room(size_class) == 0) return false;
    const auto [slab, slot] = slabs_.take(size_class, id);
    record.slab = slab;
    record.slot = slot;
    return true;
}

// A READY block returns its slot: it is only where its frame is.
void Store::free_slot(Id id, State from) {
    Record& record = records_[id];
    vacate(id);
    record.slab = no_slab;
    record.tier = records_.frame(id).tier;
    record.filling = record.lossy = 0;
    tally(id, from, {State::ready, record.tier});
}

void Store::arrived(Id id) {
    Id node = records_.node_of(id);
    if (records_[node].first_child == none || !places_[records_[id].place].full) return;
    if (!records_[node].cut && complete(node)) join_below(node);
}

void Store::commit(Ids ids, const char* checksums) {
    transition(ids, Event::commit);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Record& record = records_[ids[i]];
        record.summed = checksums != nullptr;
        if (checksums)
            std::memcpy(records_.checksum(ids[i]).bytes.data(), checksums + i * checksum_bytes,
                        checksum_bytes);
        tally(ids[i], State::writing, State::ready);
        arrived(ids[i]);
        note_ready(ids[i]);
    }
}

void Store::note_writing(Id id, Noted state, std::uint32_t owner, std::uint64_t expires_ms) {
    const Record& record = records_[id];
    SlotNote* note = slabs_.note(record.slab, record.slot);
    if (!note) return;
    const Place& place = places_[record.place];
    Id parent = parent_of(id);
    note->open();
    note->space = spaces_[place.space].name;
    note->group = place.group;
    note->shard = place.shard;
    note->rest = 0;
    note->key = key_of(id);
    note->parent = parent != none ? records_[parent].key : Key{};
    note->sequence = ++sequence_;
    note->expires_ms = expires_ms;
    NoteMark mark{};
    mark.owner = owner;
    mark.state = state;
    mark.has_parent = parent != none;
    note->close(mark, slabs_.address(record.slab, record.slot).generation);
}

void Store::note_ready(Id id) {
    const Record& record = records_[id];
    SlotNote* note = slabs_.note(record.slab, record.slot);
    if (!note) return;
    NoteMark mark = note->mark;
    mark.state = Noted::ready;
    mark.summed = records_.summed(id);
    mark.lossy = record.lossy;
    if (mark.summed) note->checksum = records_.own_checksum(id);
    note->become(mark);
}

Adopted Store::adopt(std::span<const NotedPages> pages,
                     const std::unordered_map<std::uint32_t, std::uint32_t>& spaces) {
    need(counts_.nodes == 0, "blocks are taken over by an empty store only");
    struct Found {
        std::uint32_t extent;
        const SlotNote* note;
        std::uint32_t place;
        Slabs::Known slot;
    };
    Adopted adopted;
    std::vector<Found> found;
    for (const NotedPages& run : pages) {
        const SlotNote* notes = slabs_.notes(run.extent);
        std::uint64_t end = std::min(run.first + run.pages, slabs_.pages(run.extent));
        for (std::uint64_t page = run.first; notes && page < end; ++page) {
            const SlotNote& note = notes[page];
            if (note.generation == SlotNote::opened) slabs_.outdate(run.extent, page);
            if (!note.generation || !slabs_.is_current(run.extent, page)) continue;
            auto known = spaces.find(note.space);
            bool fits = note.mark.state != Noted::nothing && known != spaces.end();
            if (fits) {
                const std::vector<GroupSpec>& groups = space(known->second).groups;
                fits = note.group < groups.size() && note.shard < groups[note.group].shards;
            }
            std::uint32_t at = fits ? place(known->second, note.group, note.shard) : 0;
            std::uint64_t slot = fits ? slabs_.pages_of(places_[at].size_class) : 0;
            if (fits && page + slot <= slabs_.pages(run.extent)) {
                found.push_back({run.extent, &note, at, {page, places_[at].size_class}});
            } else {
                slabs_.outdate(run.extent, page);
                adopted.dropped += note.mark.state == Noted::ready;
            }
        }
    }
    // Slots that overlap contradict each other: none of them is taken over.
    std::ranges::sort(found, {},
                      [](const Found& one) { return std::pair{one.extent, one.slot.page}; });
    std::vector<bool> apart(found.size(), true);
    for (std::size_t i = 1, before = 0; i < found.size(); ++i) {
        const Slabs::Known& last = found[before].slot;
        std::uint64_t end = last.page + slabs_.pages_of(last.size_class);
        if (found[before].extent == found[i].extent && found[i].slot.page < end)
            apart[before] = apart[i] = false;
        const Slabs::Known& own = found[i].slot;
        if (found[before].extent != found[i].extent ||
            own.page + slabs_.pages_of(own.size_class) > end)
            before = i;
    }
    std::vector<Found> kept;
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (apart[i]) {
            kept.push_back(found[i]);
        } else {
            slabs_.outdate(found[i].extent, found[i].slot.page);
            ++adopted.dropped;
        }
    }
    std::vector<Slabs::Known> laid, slots;
    for (std::size_t first = 0, end; first < kept.size(); first = end) {
        slots.clear();
        for (end = first; end < kept.size() && kept[end].extent == kept[first].extent; ++end)
            slots.push_back(kept[end].slot);
        slabs_.lay(kept[first].extent, slots);
        for (std::size_t i = first; i < end; ++i) kept[i].slot = slots[i - first];
        laid.insert(laid.end(), slots.begin(), slots.end());
    }
    // Parents were mostly reserved before their children.
    std::ranges::sort(kept, {}, [](const Found& one) { return one.note->sequence; });
    for (std::size_t i = 0; i < kept.size(); ++i) {
        const Found& one = kept[i];
        if (i % 256 == 0) begin();
        // A slot that is being read must not occupy its key: the block is in a tier below.
        SlotNote note = *one.note;
        if (note.mark.state == Noted::reading) {
            note.key = Key{{~note.sequence, note.generation, one.extent, one.slot.page}};
            note.mark.has_parent = note.mark.owner = 0;
        }
        sequence_ = std::max(sequence_, note.sequence);
        std::optional<Id> id = adopt_one(note, one.place);
        if (!id) {  // its slot stays closed until `open`
            slabs_.outdate(one.extent, one.slot.page);
            ++adopted.dropped;
            continue;
        }
        slabs_.put(one.slot, *id);
        records_[*id].slab = one.slot.slab;
        records_[*id].slot = one.slot.slot;
        if (note.mark.state == Noted::ready) {
            adopted.ready.push_back(*id);
            adopted.expires_ms.push_back(note.expires_ms);
        } else {
            adopted.writing.push_back(*id);
            adopted.owners.push_back(note.mark.owner);
        }
    }
    slabs_.open(laid);
    return adopted;
}

// The block of a note; none if its key has one already.
std::optional<Id> Store::adopt_one(const SlotNote& note, std::uint32_t at) {
    std::uint32_t space = places_[at].space;
    auto node_of = [&](const Key& key) {
        std::uint64_t hash = index_.hash(space, key);
        Id node = find(space, key, hash);
        return node == none ? make_node(space, key, hash) : node;
    };
    Id above = note.mark.has_parent ? node_of(note.parent) : none;
    Id node = node_of(note.key);
    if (residency(node, at) != none) {
        if (above != none) drop_idle(above);
        return std::nullopt;
    }
    set_parent(node, above);
    Id id = attach(node, at, Event::reserve);
    if (above != none) drop_idle(above);
    Record& record = records_[id];
    if (note.mark.state == Noted::ready) {
        record.become(after(Event::commit));
        record.summed = note.mark.summed;
        record.lossy = note.mark.lossy;
        if (note.mark.summed) records_.checksum(id) = note.checksum;
        tally(id, State::writing, State::ready);
        arrived(id);
    } else {
        record.become(after(Event::quarantine));
        tally(id, State::writing, State::quarantined);
    }
    return id;
}

void Store::abort(Ids ids) {
    transition(ids, Event::abort);
    for (Id id : ids) leave(id, State::writing, nullptr);
}

void Store::quarantine(Ids ids) {
    transition(ids, Event::quarantine);
    for (Id id : ids) tally(id, State::writing, State::quarantined);
}

void Store::gone(Ids ids) {
    transition(ids, Event::gone);
    for (Id id : ids) leave(id, State::quarantined, nullptr);
}

void Store::own(Ids ids, std::uint32_t owner) {
    for (Id id : ids) {
        const Record& record = block(id);
        need(record.is() == State::quarantined && !record.filling, "a block is not quarantined");
        SlotNote* note = slabs_.note(record.slab, record.slot);
        if (!note) continue;
        NoteMark mark = note->mark;
        mark.owner = owner;
        note->become(mark);
    }
}

void Store::regain(Ids ids) {
    transition(ids, Event::regain);
    for (Id id : ids) tally(id, State::quarantined, State::writing);
}

IdList Store::evict(Ids ids) {
    need(all_distinct(ids), "an id is given twice");
    change(ids, [](const Record& record) {
        if (!record.evictable()) return State::unused;
        return after(record.framed ? Event::evict_framed : Event::evict);
    });
    IdList orphans;
    for (Id id : ids)
        if (records_[id].is() == State::ready)
            free_slot(id, State::ready);
        else
            leave(id, State::ready, &orphans);
    keep_orphans(orphans);
    return orphans;
}

// A block that is being read, from a tier below or by a lease holder, keeps its slot until then.
Left Store::forget(Ids ids) {
    std::vector<State> was = change(ids, [](const Record& record) {
        switch (record.is()) {
            case State::ready:
                return after(record.leases ? Event::forget_leased : Event::forget);
            case State::promoting:
                return after(Event::forget_promoting);
            default:
                return State::unused;
        }
    });
    Left left;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Id id = ids[i];
        Record& record = records_[id];
        if (record.framed) left.died.push_back(records_.frame(id));
        records_.drop_frame(id);
        if (record.is() == State::absent) {
            leave(id, was[i], &left.orphans);
            left.gone.push_back(id);
        } else {
            tally(id, was[i], record.is());
            // A slot that a disk may still write to stays noted.
            SlotNote* note = slabs_.note(record.slab, record.slot);
            if (note && record.is() == State::doomed) {
                NoteMark mark = note->mark;
                mark.state = Noted::nothing;
                note->become(mark);
            }
            if (places_[record.place].full) cut_below(records_.node_of(id), &left.orphans);
        }
    }
    keep_orphans(left.orphans);
    return left;
}

void Store::lease(Ids ids) {
    need(all_distinct(ids), "an id is given twice");
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (i + 8 < ids.size()) prefetch(ids[i + 8]);
        Id id = ids[i];
        bool there =
            records_.known(id) && (records_[id].in_memory() || records_[id].is() == State::doomed);
        if (there && records_[id].leases < max_leases) {
            ++records_[id].leases;
            continue;
        }
        while (i-- > 0) --records_[ids[i]].leases;
        if (there) throw std::overflow_error("a block has 65534 leases already");
        throw std::invalid_argument("only READY and DOOMED blocks can be leased");
    }
}

std::pair<IdList, IdList> Store::unlease(Ids ids) {
    IdList ended, evictable, freed;
    ended.reserve(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (i + 8 < ids.size()) prefetch(ids[i + 8]);
        Id id = ids[i];
        if (records_.known(id) && records_[id].leases) {
            if (--records_[id].leases == 0) ended.push_back(id);
            continue;
        }
        while (i-- > 0) ++records_[ids[i]].leases;
        throw std::invalid_argument("a block has no lease to end, or no block has this id");
    }
    begin();
    evictable.reserve(ended.size());
    for (Id id : ended) {
        if (records_[id].is() == State::ready) {
            evictable.push_back(id);
        } else {
            records_[id].become(after(Event::last_unlease));
            leave(id, State::doomed, nullptr);
            freed.push_back(id);
        }
    }
    return {std::move(evictable), std::move(freed)};
}

std::size_t Store::memory_bytes() const {
    constexpr std::size_t map_node = 64;
    std::size_t listed = 0;
    for (const auto& [number, copies] : hot_) listed += map_node + copies->memory_bytes();
    for (const auto& [segment, ids] : segments_) listed += map_node + ids.capacity() * sizeof(Id);
    return records_.memory_bytes() + index_.memory_bytes() + slabs_.memory_bytes() +
           places_.capacity() * sizeof(Place) + spaces_.capacity() * sizeof(Space) + listed +
           newly_used_.capacity() * sizeof(Id);
}

}  // namespace kvtier
