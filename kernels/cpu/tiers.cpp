// The store's calls about lower tiers: records and drops frames, promotes, restores segments.
#include <algorithm>
#include <unordered_map>

#include "store.h"

namespace kvtier {
namespace {

template <class T>
T load(const char* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
}

Frame frame_at(const char* frames, std::size_t i, std::uint32_t tier = memory) {
    auto frame = load<Frame>(frames + i * sizeof(Frame));
    frame.tier = static_cast<std::uint8_t>(tier);
    return frame;
}

void need_below(std::uint32_t tier) {
    need(tier > memory && tier < max_tiers, "frames are in the tiers 1 to 3");
}

bool same_bytes(const Frame& a, const Frame& b) {
    return a.segment == b.segment && a.page == b.page;
}

// A row of a segment's footer; daemon/kvtier_daemon/tiers/cold/segment.py describes all fields.
struct Row {
    static constexpr std::size_t bytes = 128;
    static constexpr std::uint32_t has_parent = 1;
    const char* at;
    Key key() const { return Key::read(at); }
    Key parent() const { return Key::read(at + 32); }
    std::uint16_t group() const { return load<std::uint16_t>(at + 68); }
    std::uint16_t shard() const { return load<std::uint16_t>(at + 70); }
    std::uint32_t page() const { return load<std::uint32_t>(at + 72); }
    std::uint16_t header_pages() const { return load<std::uint16_t>(at + 80); }
    std::uint16_t codec() const { return load<std::uint16_t>(at + 82); }
    std::uint64_t payload_bytes() const { return load<std::uint64_t>(at + 84); }
    const char* digest() const { return at + 108; }
    std::uint32_t flags() const { return load<std::uint32_t>(at + 124); }
};

}  // namespace

// ---- frames ----

void Store::note_frame(Id id, const Frame& frame, const char* digest) {
    const bool keeps = frame.codec && records_.summed(id);
    const Checksum own = keeps ? records_.own_checksum(id) : Checksum{};
    records_.set_frame(id, frame);
    if (keeps) records_.set_own_checksum(id, own);
    Record& record = records_[id];
    if (record.tier != memory && record.tier != frame.tier) {
        tally(id, {State::ready, record.tier}, {State::ready, frame.tier});
        record.tier = frame.tier;
    }
    if (digest) {
        std::memcpy(records_.checksum(id).bytes.data(), digest, checksum_bytes);
        record.summed = 1;
    }
    IdList& listed = segments_[frame.segment];
    // Grows by a quarter, not twofold: there is an entry for each block with a frame.
    if (listed.size() == listed.capacity()) listed.reserve(listed.size() + listed.size() / 4 + 16);
    listed.push_back(id);
}

IdList Store::framed(std::uint32_t tier, Ids ids, const char* frames, const char* digests) {
    need_below(tier);
    auto awaited = [&](Id id) { return records_[id].is() == State::ready && !records_[id].framed; };
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (i + 8 < ids.size()) prefetch(ids[i + 8]);
        static_cast<void>(block(ids[i]));
        need(digests || !awaited(ids[i]) ||
                 (records_.summed(ids[i]) && frame_at(frames, i).codec == 0),
             "a frame needs the digest of its payload");
    }
    IdList late;
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (awaited(ids[i]))
            note_frame(ids[i], frame_at(frames, i, tier),
                       digests ? digests + i * checksum_bytes : nullptr);
        else
            late.push_back(ids[i]);
    return late;
}

// While a segment exists, a place in it belongs to one frame. An equal place therefore proves that
// this is still the intended block.
IdList Store::moved(Ids ids, const char* before, const char* frames) {
    IdList late;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Id id = ids[i];
        bool same = records_.known(id) && records_[id].framed &&
                    same_bytes(records_.frame(id), frame_at(before, i)) &&
                    records_.frame(id).codec == frame_at(frames, i).codec;
        if (same)
            note_frame(id, frame_at(frames, i, records_.frame(id).tier), nullptr);
        else
            late.push_back(id);
    }
    return late;
}

const Frame& Store::frame(Id id) const {
    need(block(id).framed, "a block without a frame cannot be moved");
    return records_.frame(id);
}

IdList Store::dirty(Ids ids) const {
    IdList without;
    for (Id id : ids)
        if (records_.known(id) && records_[id].is() == State::ready && !records_[id].framed)
            without.push_back(id);
    return without;
}

IdList Store::clean(Ids ids, bool in_memory) const {
    IdList found;
    for (Id id : ids)
        if (records_.known(id) && records_[id].is() == State::ready && records_[id].framed &&
            (records_[id].tier == memory) == in_memory)
            found.push_back(id);
    return found;
}

// Those whose bytes in memory were decoded from a lossy frame.
IdList Store::lossy(Ids ids) const {
    IdList found;
    for (Id id : ids)
        if (block(id).lossy) found.push_back(id);
    return found;
}

// The number of known keys before each block. Blocks share most of their path to the root, in any
// order: a walk stops at a requested node of known depth, then sets those that it passed.
std::vector<std::uint32_t> Store::depths(Ids ids) const {
    constexpr std::uint32_t unknown = none;
    std::unordered_map<Id, std::uint32_t> asked;
    for (Id id : ids) {
        static_cast<void>(block(id));
        asked.emplace(records_.node_of(id), unknown);
    }
    // requested nodes on this path, with their number of steps
    std::vector<std::pair<Id, std::uint32_t>> met;
    for (Id id : ids) {
        met.clear();
        std::uint32_t steps = 0, above = 0;
        for (Id at = records_.node_of(id);; at = records_[at].parent, ++steps) {
            if (auto there = asked.find(at); there != asked.end()) {
                above = there->second;
                if (above != unknown) break;
                met.emplace_back(at, steps);
            }
            above = 0;
            if (records_[at].parent == none) break;
        }
        for (auto [node, at] : met) asked[node] = above + steps - at;
    }
    std::vector<std::uint32_t> found;
    found.reserve(ids.size());
    for (Id id : ids) found.push_back(asked[records_.node_of(id)]);
    return found;
}

// Returns the dirty, unleased blocks among the first ids that together have `within` bytes, up to
// the limit; and whether more ids could not have changed the result.
std::pair<IdList, bool> Store::coldest(Ids ids, std::uint64_t within, std::uint64_t limit) const {
    IdList without;
    std::uint64_t seen = 0, taken = 0;
    for (std::size_t i = 0; i < ids.size() && seen < within; ++i) {
        if (i + 8 < ids.size()) prefetch(ids[i + 8]);
        const Record& record = block(ids[i]);
        std::uint64_t bytes = places_[record.place].block_bytes;
        seen += bytes;
        if (!record.evictable() || record.framed) continue;
        // Takes the first block even above the limit: else a large block could never be written.
        if (limit == 0 || (taken != 0 && taken + bytes > limit)) return {std::move(without), true};
        taken += bytes;
        without.push_back(ids[i]);
    }
    return {std::move(without), seen >= within};
}

// ---- promotion ----

std::size_t Store::promote(Ids ids) {
    change(ids, [](const Record& record) {
        bool below = record.is() == before(Event::promote) && record.tier != memory;
        return below ? after(Event::promote) : State::unused;
    });
    std::size_t n = 0;
    for (; n < ids.size() && take_slot(ids[n]); ++n) {
        Record& record = records_[ids[n]];
        tally(ids[n], {State::ready, record.tier}, State::promoting);
        record.tier = memory;
        record.filling = 1;
        // Copied now, because the frame may be dropped during the read.
        record.lossy = (records_.frame(ids[n]).flags & lossy_frame) != 0;
        records_.drop_own_checksum(ids[n]);
        note_writing(ids[n], Noted::reading, 0, 0);
    }
    for (std::size_t i = n; i < ids.size(); ++i) records_[ids[i]].become(before(Event::promote));
    return n;
}

// Ends the reads; removes blocks that were forgotten meanwhile. Returns the previous states.
std::vector<State> Store::end_reads(Ids ids, State to, State without_frame) {
    return change(ids, [=](const Record& record) {
        if (!record.filling) return State::unused;
        if (record.is() == State::quarantined) return after(Event::gone);
        if (record.is() != State::promoting) return State::unused;
        return record.framed ? to : without_frame;
    });
}

std::pair<IdList, IdList> Store::promoted(Ids ids, const char* checksums) {
    State ready = after(Event::promoted);
    std::vector<State> was = end_reads(ids, ready, ready);
    IdList there, gone;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Record& record = records_[ids[i]];
        if (record.is() == ready) {
            record.filling = 0;
            if (checksums)
                records_.set_own_checksum(ids[i], load<Checksum>(checksums + i * checksum_bytes));
            tally(ids[i], was[i], ready);
            note_ready(ids[i]);
            there.push_back(ids[i]);
        } else {
            leave(ids[i], was[i], nullptr);
            gone.push_back(ids[i]);
        }
    }
    return {std::move(there), std::move(gone)};
}

Left Store::unpromoted(Ids ids) {
    std::vector<State> was = end_reads(ids, after(Event::unpromoted), after(Event::spoilt));
    Left left;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (records_[ids[i]].is() == State::ready) {
            free_slot(ids[i], was[i]);
        } else {
            leave(ids[i], was[i], &left.orphans);
            left.gone.push_back(ids[i]);
        }
    }
    keep_orphans(left.orphans);
    return left;
}

Left Store::spoilt(Ids ids) {
    std::vector<State> was = end_reads(ids, after(Event::spoilt), after(Event::spoilt));
    Left left;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (records_[ids[i]].framed) left.died.push_back(records_.frame(ids[i]));
        leave(ids[i], was[i], &left.orphans);
        left.gone.push_back(ids[i]);
    }
    keep_orphans(left.orphans);
    return left;
}

// The block has lost its frame: it leaves if it was only there.
void Store::lose(Id id, Left& left) {
    if (records_[id].tier == memory) return;
    records_[id].become(after(Event::lost));
    leave(id, State::ready, &left.orphans);
    left.gone.push_back(id);
}

// A block whose frame is being read is left to the result of that read.
Left Store::damaged(Ids ids, const char* frames) {
    Left left;
    begin();
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Id id = ids[i];
        if (!records_.known(id) || !records_[id].framed ||
            !same_bytes(records_.frame(id), frame_at(frames, i)))
            continue;
        if (records_[id].is() == State::promoting) continue;
        left.died.push_back(records_.frame(id));
        records_.drop_frame(id);
        lose(id, left);
    }
    keep_orphans(left.orphans);
    return left;
}

// ---- segments ----

// A segment is written from its start to its end, so pages give the order. An id may be listed more
// than once, for example if its block left.
IdList Store::in_segment(std::uint32_t segment) const {
    auto listed = segments_.find(segment);
    if (listed == segments_.end()) return {};
    IdList ids;
    for (Id id : listed->second)
        if (lies_in(id, segment)) ids.push_back(id);
    auto page = [this](Id id) { return std::pair(records_.frame(id).page, id); };
    if (!std::ranges::is_sorted(ids, {}, page)) std::ranges::sort(ids, {}, page);
    auto twice = std::ranges::unique(ids);
    ids.erase(twice.begin(), twice.end());
    return ids;
}

IdList Store::still(Ids ids, std::uint32_t segment) const {
    IdList there;
    for (Id id : ids)
        if (lies_in(id, segment)) there.push_back(id);
    return there;
}

std::vector<Frame> Store::take_used(std::size_t limit) {
    std::vector<Frame> frames;
    for (; limit != 0 && !newly_used_.empty(); --limit) {
        Id id = newly_used_.back();
        newly_used_.pop_back();
        if (records_.known(id) && records_[id].used) frames.push_back(records_.frame(id));
    }
    return frames;
}

bool Store::earns_second_chance(Id id) {
    need(block(id).framed, "a block without a frame is not in a segment");
    return records_.judge(id);
}

Left Store::drop_segment(std::uint32_t segment) {
    Left left;
    begin();
    for (Id id : in_segment(segment)) {
        records_.drop_frame(id);
        lose(id, left);
    }
    segments_.erase(segment);
    keep_orphans(left.orphans);
    return left;
}

// True if this frame can be attached: it belongs to a block in memory without a frame. A raw frame
// must have the digest of the block's bytes, because it becomes that of the block. The digest of an
// encoded frame covers only its payload, and each frame of this key is valid.
bool Store::is_frame_of(Id id, const Frame& frame, const char* digest) const {
    if (records_[id].is() != State::ready || records_[id].framed) return false;
    return frame.codec || (records_.summed(id) && !std::memcmp(records_.checksum(id).bytes.data(),
                                                               digest, checksum_bytes));
}

Restored Store::restore(std::uint32_t tier, std::uint32_t in, const char* rows, std::size_t n,
                        std::uint32_t segment, std::span<const std::uint32_t> used) {
    constexpr std::size_t step = 12, ring = 32, breath = 256;
    const Space& found = space(in);
    need_below(tier);
    need(std::ranges::is_sorted(used), "used pages must ascend");
    IdList& listed = segments_[segment];  // the reference stays valid
    listed.reserve(listed.size() + n);
    std::array<std::uint64_t, ring> hashes;
    auto prefetch_step = [&](std::size_t i) {
        if (i >= n) return;
        hashes[i % ring] = index_.hash(in, Row{rows + i * Row::bytes}.key());
        index_.prefetch(hashes[i % ring]);
    };
    for (std::size_t i = 0; i < 2 * step; ++i) prefetch_step(i);
    Restored over;
    Id last = none;  // the node of the previous row
    auto note = [&](Id id, const Frame& frame, const char* digest) {
        note_frame(id, frame, digest);
        records_[id].used = std::ranges::binary_search(used, frame.page);
    };
    for (std::size_t i = 0; i < n; ++i) {
        if (i % breath == 0) begin();
        prefetch_step(i + 2 * step);
        if (i + step < n) index_.prefetch_records(hashes[(i + step) % ring]);
        Row row{rows + i * Row::bytes};
        bool fits = row.group() < found.groups.size() &&
                    row.shard() < found.groups[row.group()].shards && row.codec() < 256 &&
                    row.header_pages() < 256 && row.payload_bytes() >> 32 == 0 &&
                    (row.codec() ? row.payload_bytes() <= found.groups[row.group()].block_bytes
                                 : row.payload_bytes() == found.groups[row.group()].block_bytes);
        if (!fits) {
            ++over.unfit;
            continue;
        }
        Frame frame{segment,
                    row.page(),
                    static_cast<std::uint32_t>(row.payload_bytes()),
                    static_cast<std::uint8_t>(row.codec()),
                    static_cast<std::uint8_t>(row.header_pages()),
                    static_cast<std::uint8_t>(row.flags()),
                    static_cast<std::uint8_t>(tier),
                    0,
                    0,
                    0};
        std::uint32_t place = found.first_place[row.group()] + row.shard();
        std::uint64_t hash = hashes[i % ring];
        Key key = row.key();
        Id node = find(in, key, hash), there = node == none ? none : residency(node, place);
        if (there != none) {
            if (records_[there].tier != memory) {
                over.died.push_back(records_.frame(there));
                note(there, frame, row.digest());
            } else if (is_frame_of(there, frame, row.digest())) {
                note(there, frame, row.digest());
                ++over.made;
            } else {
                over.died.push_back(frame);
            }
            last = node;
            continue;
        }
        Id above = none;
        if (row.flags() & Row::has_parent) {
            Key parent = row.parent();
            if (last != none && records_[last].key == parent) {
                above = last;
            } else {
                std::uint64_t over = index_.hash(in, parent);
                above = find(in, parent, over);
                if (above == none) above = make_node(in, parent, over);
                if (parent == key) node = above;
            }
        }
        if (node == none) node = make_node(in, key, hash);
        set_parent(node, above);
        Id id = attach(node, place, Event::restore, tier);
        note(id, frame, row.digest());
        arrived(id);
        if (above != none) drop_idle(above);
        last = node;
        ++over.made;
    }
    if (listed.empty()) segments_.erase(segment);
    return over;
}

}  // namespace kvtier
