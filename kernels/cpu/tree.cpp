// The prefix tree: nodes, ghosts, and which blocks a match can reach from their root.
//
// A node is *cut* if a node above it lacks a block of a full group: no match gets past that gap.
// All children of a node have the same flag, and a walk stops where the flag is already set.
#include <algorithm>
#include <stdexcept>

#include "store.h"

namespace kvtier {

Id Store::make_node(std::uint32_t space, const Key& key, std::uint64_t hash) {
    Id node = records_.make();
    Record& record = records_[node];
    record.key = key;
    record.place = spaces_[space].first_place[0];
    index_.insert(hash, node, [this](Id id) { return hash_of(id); });
    ++spaces_[space].nodes;
    ++counts_.nodes;
    ++counts_.ghosts;
    return node;
}

// Runs at the start of each call that may remove nodes.
void Store::begin() {
    walked_ = climbed_ = 0;
    while (!pending_ghosts_.empty() && climbed_ < walk_limit) {
        Id node = pending_ghosts_.back();
        pending_ghosts_.pop_back();
        if (records_.known(node) && !records_[node].further) drop_idle(node);
    }
}

// Removes a ghost without children, and then its parent if that became one. Above the limit also
// ghosts with one child, which is loose then. Fewer ghosts than blocks have several children, so
// the number of ghosts, and of nodes that a call climbs, is bounded.
void Store::drop_idle(Id node) {
    for (;;) {
        Record& record = records_[node];
        if (!record.ghost()) return;
        Id child = record.first_child, parent = record.parent;
        if (child != none) {
            if (counts_.ghosts <= ghost_limit_ || records_[child].next_sibling != none) return;
            records_[child].parent = none;
            records_[child].loose = 1;
        }
        if (parent != none) {
            if (record.prev_sibling != none)
                records_[record.prev_sibling].next_sibling = record.next_sibling;
            else
                records_[parent].first_child = record.next_sibling;
            if (record.next_sibling != none)
                records_[record.next_sibling].prev_sibling = record.prev_sibling;
        }
        index_.erase(hash_of(node), node);
        --spaces_[places_[record.place].space].nodes;
        records_.drop(node);
        --counts_.nodes;
        --counts_.ghosts;
        if (parent == none) return;
        node = parent;
        if (++climbed_ > walk_limit) {
            pending_ghosts_.push_back(node);
            return;
        }
    }
}

// Links a parentless ghost, or a loose node, below its parent; `none` makes it a root. A client may
// give wrong parents: no link is made that is a cycle, or whose check would take too long.
void Store::set_parent(Id node, Id parent) {
    Record& record = records_[node];
    if (record.parent != none || !(record.ghost() || record.loose)) return;
    bool cut = false;
    if (parent != none) {
        if (node == parent) return;
        if (record.first_child != none)
            for (Id above = parent; above != none; above = records_[above].parent)
                if (above == node || ++climbed_ > walk_limit) return;
        Record& over = records_[parent];
        record.parent = parent;
        record.next_sibling = over.first_child;
        if (over.first_child != none) records_[over.first_child].prev_sibling = node;
        over.first_child = node;
        cut = over.cut || !complete(parent);
    }
    // Nodes below a ghost are cut already, and a loose node was cut before.
    bool joined = record.cut && !cut;
    record.loose = 0;
    record.cut = cut;
    if (joined && record.first_child != none && complete(node)) join_below(node);
}

// True if each shard of each full group is READY in any tier, or being read.
bool Store::complete(Id node) const {
    const Space& space = spaces_[places_[records_[node].place].space];
    std::uint32_t ready = 0;
    for (Id id = node; id != none; id = records_[id].more)
        ready += restorable(records_[id].is()) && places_[records_[id].place].full;
    return ready == space.full_places;
}

// A block of a full group left this node: cuts all nodes below it, and adds their evictable blocks,
// which no match can reach, to `orphans`.
void Store::cut_below(Id node, IdList* orphans) {
    set_cut_below(node, true, [&](Id child) {
        if (orphans)
            for (Id id = child; id != none; id = records_[id].more)
                if (records_[id].evictable() && places_[records_[id].place].full)
                    orphans->push_back(id);
        return true;
    });
}

// This node is complete and not cut: clears the flag of the nodes below it, down to the next gap.
void Store::join_below(Id node) {
    set_cut_below(node, false, [this](Id child) {
        return records_[child].first_child != none && complete(child);
    });
}

// Sets the flag of the nodes below this one that have the other value, as far as `passes` is true
// for the nodes on the way.
template <class Passes>
void Store::set_cut_below(Id node, bool cut, Passes passes) {
    stack_.assign(1, node);
    while (!stack_.empty()) {
        Id above = stack_.back();
        stack_.pop_back();
        for (Id child = records_[above].first_child; child != none;
             child = records_[child].next_sibling) {
            if (records_[child].cut == cut) continue;
            if (++walked_ > walk_limit) {
                cut_short_ = true;
                return;
            }
            records_[child].cut = cut;
            if (passes(child) && records_[child].first_child != none) stack_.push_back(child);
        }
    }
}

// Later steps of the same call may have evicted some.
void Store::keep_orphans(IdList& ids) const {
    std::erase_if(ids, [this](Id id) { return !records_[id].evictable(); });
}

void Store::check_node(Id node, Counts& seen) const {
    auto hold = [](bool condition, const char* what) {
        if (!condition) throw std::logic_error(what);
    };
    const Record& record = records_[node];
    std::uint32_t space = places_[record.place].space;
    hold(find(space, record.key) == node, "a node is not in the index");
    ++seen.nodes;
    seen.ghosts += record.ghost();
    hold(!record.ghost() || record.first_child != none || std::ranges::count(pending_ghosts_, node),
         "a ghost without children is kept");
    hold(!record.loose || record.parent == none, "a loose node has a parent");
    bool found = record.parent == none;
    if (!found)
        for (Id child = records_[record.parent].first_child; child != none && !found;
             child = records_[child].next_sibling)
            found = child == node;
    hold(found, "a node is missing among its parent's children");
    Id before = none;
    for (Id child = record.first_child; child != none; child = records_[child].next_sibling) {
        hold(records_[child].parent == node && records_[child].prev_sibling == before,
             "a child's links are wrong");
        hold(cut_short_ || records_[child].cut == (record.cut || !complete(node)),
             "a node's cut flag is wrong");
        before = child;
    }
    hold(record.parent != none || record.loose || !record.cut, "a root is cut");
    Id slow = node;
    for (Id fast = node; fast != none && records_[fast].parent != none;) {
        fast = records_[records_[fast].parent].parent;
        slow = records_[slow].parent;
        hold(fast != slow || fast == none, "parents form a cycle");
    }
    for (Id id = node; id != none; id = records_[id].more) {
        const Record& block = records_[id];
        hold(id == node || (block.further && block.parent == node), "a residency is not listed");
        if (block.is() == State::absent) {
            hold(id == node && block.slab == no_slab && block.tier == memory,
                 "an absent block is kept");
            continue;
        }
        hold(residency(node, block.place) == id, "two blocks have the same place");
        hold(places_[block.place].space == space, "a block is in another space than its key");
        hold(!block.leases || block.in_memory() || block.is() == State::doomed,
             "a leased block is in the wrong state");
        hold(block.is() != State::doomed || block.leases, "a doomed block outlived its leases");
        hold((block.tier == memory) == (block.slab != no_slab), "a block below memory has a slot");
        hold(block.tier == memory || (block.is() == State::ready && block.framed &&
                                      records_.frame(id).tier == block.tier),
             "a block below memory has no frame there");
        hold(!block.framed || restorable(block.is()), "a block with a frame is in the wrong state");
        hold(block.framed || !block.used, "a block without a frame counts as used");
        hold(block.is() == State::promoting ? block.filling
                                            : !block.filling || block.is() == State::quarantined,
             "a block that is being read is in the wrong state");
        const std::size_t at = Counts::at({block.is(), block.tier});
        ++seen.blocks[at];
        seen.bytes[at] += places_[block.place].block_bytes;
    }
}

void Store::check() const {
    Counts seen;
    std::vector<bool> listed(records_.limit(), false);
    for (const auto& [segment, ids] : segments_)
        for (Id id : ids)
            if (lies_in(id, segment)) listed[id] = true;
    for (Id id = 0; id < records_.limit(); ++id) {
        if (!records_.known(id)) continue;
        if (!records_[id].further) check_node(id, seen);
        if (records_[id].framed && !listed[id])
            throw std::logic_error("a frame is not listed by its segment");
    }
    if (seen.blocks != counts_.blocks || seen.bytes != counts_.bytes ||
        seen.nodes != counts_.nodes || seen.ghosts != counts_.ghosts || index_.size() != seen.nodes)
        throw std::logic_error("the counts are wrong");
    slabs_.check([this](Id id) {
        return std::pair<std::uint32_t, std::uint16_t>{records_[id].slab, records_[id].slot};
    });
    for (const auto& [number, copies] : hot_) copies->check();
}

}  // namespace kvtier
