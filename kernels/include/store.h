// The catalog's store of one tenant: which blocks there are, in which state, in which slots.
//
// It decides nothing by itself: no clock, no I/O, no threads, no policy. Calls take batches. A bad
// argument throws and keeps nothing of the batch.
#pragma once
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index.h"
#include "record.h"
#include "slabs.h"

namespace kvtier {

enum class Kind : std::uint8_t { full, window, state };

struct GroupSpec {
    Kind kind;
    std::uint32_t window_blocks;
    std::uint64_t block_bytes;
    std::uint32_t shards;
};

// One shard of one group of one space.
struct Place {
    std::uint32_t space, group, shard;
    std::uint32_t size_class;
    std::uint64_t block_bytes;
    bool full;
};

struct Space {
    std::vector<GroupSpec> groups;
    std::vector<std::uint32_t> first_place;  // of each group
    std::uint32_t places = 0, full_places = 0, nodes = 0;
    bool plain = false;  // one full group of one shard: a match looks at one record a key
};

// The blocks of one group and shard that a prefix is restored from, `first` being their place in
// it.
struct Part {
    std::uint32_t group, shard;
    std::size_t first;
    std::vector<Id> ids;
};

struct Match {
    std::size_t ready = 0, restorable = 0;
    std::vector<Part> parts;  // what the READY prefix is restored from
};

// What became of a footer's rows: `made` have a frame now and had none, `died` are frames of blocks
// that have another one, or other bytes in memory.
struct Restored {
    std::size_t made = 0, unfit = 0;
    std::vector<Frame> died;
};

// Of one group and shard, what a prefix needs and memory lacks.
struct Missing {
    std::uint32_t group, shard;
    std::vector<Id> cold, promoting;
};

// What a block was called when it left its slot.
struct Name {
    std::uint32_t space, group, shard;
    Key key;
};

// What there is of a space in a run of records: a block may be in memory and on disk.
struct Tally {
    std::uint32_t space, memory, disk, other;
    std::uint64_t memory_bytes, disk_bytes;
};
static_assert(sizeof(Tally) == 32);

// What left, the blocks that no match can reach any more since then, and what else there is to say.
struct Left {
    std::vector<Id> gone, orphans, cold;
    std::vector<Frame> died;
};

struct Counts {
    std::array<std::uint64_t, state_names.size()> blocks{}, bytes{};
    std::uint64_t nodes = 0, ghosts = 0;
};

// n keys, 32 bytes each.
struct Keys {
    const char* bytes;
    std::size_t n;
    Key operator[](std::size_t i) const { return Key::read(bytes + i * key_bytes); }
};

using Ids = std::span<const Id>;
using IdList = std::vector<Id>;

class Store {
 public:
    // Of the ghosts beyond `ghosts`, those stay that several others hang on.
    explicit Store(std::size_t ghosts) : index_(records_), slabs_(records_), ghost_limit_(ghosts) {}

    std::uint32_t add_extent(std::uint64_t bytes, std::uint64_t* generations) {
        return slabs_.add_extent(bytes, generations);
    }
    std::uint32_t add_space(std::vector<GroupSpec> groups);
    bool drop_space(std::uint32_t space);  // false where it holds something

    // What is here.
    // What it finds of blocks with a frame counts as used.
    Match match(std::uint32_t space, Keys keys);
    std::vector<Missing> cold(std::uint32_t space, Keys keys, std::size_t prefix) const;
    IdList resident(std::uint32_t space, Keys keys) const;
    void states(std::uint32_t space, Key key, char* answers) const;
    void probe(std::uint32_t place, Keys keys, char* answers) const;
    IdList present(std::uint32_t place, Keys keys) const;
    IdList ancestors(std::uint32_t place, Key key, std::size_t limit) const;

    // Plans.
    std::uint64_t room(std::uint32_t space, std::uint32_t group) const;
    Left make_room(std::uint32_t space, std::uint32_t group, std::uint64_t n, Ids victims);
    // From now on, remember what make_room takes the slots of: an id that has left says it no more.
    void note_evicted(bool on);
    std::vector<Name> take_evicted() { return std::exchange(evicted_, {}); }
    // A key that is there already is found only when its turn comes: the slots taken before it are
    // given back, and their generations have moved on.
    IdList reserve(std::uint32_t place, std::optional<Key> parent, Keys keys, const char* statuses);

    // Events; each takes the whole batch or throws.
    void commit(Ids ids, const char* checksums);
    void abort(Ids ids);
    void quarantine(Ids ids);
    void gone(Ids ids);
    IdList evict(Ids ids);
    Left forget(Ids ids);
    void lease(Ids ids);
    std::pair<IdList, IdList> unlease(Ids ids);

    // The disk (cold.cpp). Those whose frame came too late, or after another, are returned.
    IdList framed(Ids ids, const char* frames, const char* digests);
    IdList moved(Ids ids, const char* before, const char* frames);
    std::size_t promote(Ids ids);  // how many, the leading ones
    std::pair<IdList, IdList> promoted(Ids ids);
    Left unpromoted(Ids ids);
    Left spoilt(Ids ids);
    Left damaged(Ids ids, const char* frames);
    IdList in_segment(std::uint32_t segment) const;
    IdList still(Ids ids, std::uint32_t segment) const;
    // Whether a block deserves another round, as that of its segment is over.
    bool deserves(Id id);
    // The frames of blocks that are used since the last call, of so many at most that were.
    std::vector<Frame> take_used(std::size_t limit);
    Left drop_segment(std::uint32_t segment);
    // Rows as a segment's footer has them; how many blocks are on disk now that were not, and how
    // many fit no block here.
    // Frames at the pages in `used`, which ascend, were wanted since they were written.
    Restored restore(std::uint32_t space, const char* rows, std::size_t n, std::uint32_t segment,
                     std::span<const std::uint32_t> used);
    IdList dirty(Ids ids) const;
    IdList lossy(Ids ids) const;
    std::vector<std::uint32_t> depths(Ids ids) const;
    std::pair<IdList, bool> coldest(Ids ids, std::uint64_t within, std::uint64_t limit) const;
    const Frame& frame(Id id) const;

    // Of the records [first, first + look): what each space has, and the blocks of one space, as
    // many as `limit`. Both say where to go on; 0 at the end.
    std::pair<Id, std::vector<Tally>> tally(Id first, Id look) const;
    std::pair<Id, IdList> listed(std::uint32_t space, Id first, Id look, std::size_t limit) const;

    // About single blocks.
    const Record& block(Id id) const;
    const Place& place_of(Id id) const { return places_[block(id).place]; }
    Id parent_of(Id id) const { return records_[records_.node_of(id)].parent; }
    // The same wherever the block is, and after it was gone.
    std::uint64_t name_of(Id id) const {
        return name_of(key_of(id).words[0],
                       block(id).place - spaces_[place_of(id).space].first_place[0]);
    }
    // By the first word of its key, and its place among those of its space.
    static std::uint64_t name_of(std::uint64_t word, std::uint64_t at) {
        return word + at * 0x9E3779B97F4A7C15;
    }
    // The block of the same group and shard before it in its chain, or none.
    Id ahead_of(Id id) const {
        const std::uint32_t place = block(id).place;
        Id above = parent_of(id);
        return above == none ? none : residency(above, place);
    }
    bool summed(Id id) const { return records_.summed(id); }
    const Key& key_of(Id id) const { return records_[records_.node_of(id)].key; }
    SlotAddress slot(Id id) const;
    const Checksum& checksum(Id id) const { return records_.checksum(id); }
    void prefetch(Id id) const {
        if (id < records_.limit()) __builtin_prefetch(&records_[id]);
    }

    std::uint32_t place(std::uint32_t space, std::uint32_t group, std::uint32_t shard) const;
    const Space& space(std::uint32_t space) const;
    std::uint64_t slot_bytes(std::uint32_t space, std::uint32_t group) const {
        return slabs_.pitch_of(places_[place(space, group, 0)].size_class);
    }
    const Counts& counts() const { return counts_; }
    std::uint64_t framed_blocks() const { return records_.framed_blocks(); }
    std::uint64_t framed_bytes() const { return records_.framed_bytes(); }
    const Slabs& slabs() const { return slabs_; }
    std::size_t memory_bytes() const;
    void check() const;

 private:
    static constexpr std::size_t walk_limit = 65536;  // nodes that one call may cut, join or climb

    // The index.
    std::uint64_t hash_of(Id node) const {
        return index_.hash(places_[records_[node].place].space, records_[node].key);
    }
    bool is_node(Id id, std::uint32_t space, const Key& key) const {
        const Record& record = records_[id];
        return record.key == key && !record.further && record.is() != State::unused &&
               places_[record.place].space == space;
    }
    Id find(std::uint32_t space, const Key& key, std::uint64_t hash) const {
        return index_.find(hash, [&](Id id) { return is_node(id, space, key); });
    }
    Id find(std::uint32_t space, const Key& key) const {
        return find(space, key, index_.hash(space, key));
    }
    static std::size_t first_needed(const GroupSpec& group, std::size_t prefix) {
        std::size_t n = group.kind == Kind::full     ? prefix
                        : group.kind == Kind::window ? group.window_blocks
                                                     : 1;
        return prefix - std::min(prefix, n);
    }
    void use(Id id) {
        if (!records_[id].framed || records_[id].used) return;
        records_[id].used = 1;
        touched_.push_back(id);
    }
    static unsigned order_of(std::uint32_t places) { return std::bit_width(places - 1); }
    std::uint32_t make_places(std::uint32_t n);
    bool distinct(std::uint32_t space, Keys keys) const;
    template <class Visit>
    void each_node(std::uint32_t space, Keys keys, Visit visit) const;
    Id residency(Id node, std::uint32_t place) const;
    Id ready_at(Id node, std::uint32_t place) const;

    // The tree (tree.cpp).
    Id make_node(std::uint32_t space, const Key& key, std::uint64_t hash);
    void begin();
    void tidy(Id node);
    void hang(Id node, Id parent);
    bool complete(Id node) const;
    void cut_below(Id node, IdList* orphans);
    void join_below(Id node);
    void keep_orphans(IdList& ids) const;
    void check_node(Id node, Counts& seen) const;

    // Events.
    // Moves each to the state that `next` says for it, or none where that is `unused` for one of
    // them; what they were.
    template <class Next>
    std::vector<State> change(Ids ids, Next next) {
        std::vector<State> was;
        was.reserve(ids.size());
        for (std::size_t i = 0; i < ids.size(); ++i) {
            if (i + 8 < ids.size()) prefetch(ids[i + 8]);
            State to = records_.known(ids[i]) ? next(records_[ids[i]]) : State::unused;
            if (to == State::unused) {
                while (i-- > 0) records_[ids[i]].become(was[i]);
                throw std::invalid_argument(
                    "a block is not in the state for this, or no block has this id");
            }
            was.push_back(records_[ids[i]].is());
            records_[ids[i]].become(to);
        }
        begin();
        return was;
    }
    void claim(Ids ids, Event event);
    void tally(Id id, State from, State to);
    void arrived(Id id);
    void leave(Id id, State from, IdList* orphans);
    void stay_on_disk(Id id, State from);
    Id attach(Id node, std::uint32_t place, Event event);
    void detach(Id id);
    std::vector<State> end_reads(Ids ids, State to, State without_frame);
    void note_frame(Id id, const Frame& frame, const char* digest);
    bool is_frame_of(Id id, const Frame& frame, const char* digest) const;
    bool lies_in(Id id, std::uint32_t segment) const {
        return records_.known(id) && records_[id].framed && records_.frame(id).segment == segment;
    }

    Records records_;
    Index index_;
    Slabs slabs_;
    std::vector<Space> spaces_;  // without groups where none has this number
    std::vector<Place> places_;
    std::vector<std::uint32_t> spare_spaces_;
    std::array<std::vector<std::uint32_t>, 25> spare_places_;  // runs of 2^n of them
    // The blocks of each segment, in the order in which their frames came; some have left since.
    std::unordered_map<std::uint32_t, IdList> segments_;
    Counts counts_;
    IdList stack_;  // of the tree's walks, kept for its memory
    bool noting_ = false;
    std::vector<Name> evicted_;
    IdList late_;     // ghosts that the next call looks at
    IdList touched_;  // blocks that are used since `take_used` looked
    std::size_t ghost_limit_;
    std::size_t walked_ = 0, climbed_ = 0;
    bool cut_short_ = false;  // a walk met its limit: some `cut` flags may be old
};

}  // namespace kvtier
