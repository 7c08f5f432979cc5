// The store of one tenant: which blocks exist, in which state, and in which slots.
//
// It makes no decisions: it has no clock, I/O, threads or policy. Calls take batches. A bad
// argument throws, and then the call changes nothing.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hot.h"
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
    std::uint32_t places = 0, full_places = 0, nodes = 0, name = 0;
    bool plain = false;  // one full group of one shard: a match reads one record per key
};

// The blocks of a group and shard that restore a prefix; `first` is the first one's position.
struct Part {
    std::uint32_t group, shard;
    std::size_t first;
    std::vector<Id> ids;
};

struct Match {
    std::size_t ready = 0, restorable = 0;
    std::vector<Part> parts;  // the READY prefix is restored from these
};

// The result of a footer's rows. `made`: blocks that had no frame and have one now; `died`: frames
// of blocks that have another frame, or other bytes in memory.
struct Restored {
    std::size_t made = 0, unfit = 0;
    std::vector<Frame> died;
};

// The blocks of one group and shard that a prefix needs and that are not in memory.
struct Missing {
    std::uint32_t group, shard;
    std::vector<Id> below, promoting;
};

// The identity of a block that was evicted.
struct Name {
    std::uint32_t space, group, shard;
    Key key;
};

// The blocks of a space in a range of records. A block can be both in memory and below.
struct Tally {
    std::uint32_t space, in_memory, below, other;
    std::uint64_t memory_bytes, below_bytes;
};
static_assert(sizeof(Tally) == 32);

// The blocks that left, the blocks that no match can reach since then, the blocks that stay only in
// a tier below, and the frames that died.
struct Left {
    std::vector<Id> gone, orphans, below;
    std::vector<Frame> died;
};

// A state; and for READY blocks the tier.
struct Status {
    State state;
    std::uint32_t tier;
    Status(State state, std::uint32_t tier = memory) : state(state), tier(tier) {}
};

struct Counts {
    static constexpr std::size_t states = state_names.size();
    // By state; after them, the READY blocks of each tier below memory.
    std::array<std::uint64_t, states + max_tiers - 1> blocks{}, bytes{};
    std::uint64_t nodes = 0, ghosts = 0;
    static std::size_t at(Status status) {
        return status.tier == memory ? static_cast<std::size_t>(status.state)
                                     : states + status.tier - 1;
    }
};

// n keys, 32 bytes each.
struct Keys {
    const char* bytes;
    std::size_t n;
    Key operator[](std::size_t i) const { return Key::read(bytes + i * key_bytes); }
    Keys from(std::size_t i) const { return {bytes + i * key_bytes, n - i}; }
};

using Ids = std::span<const Id>;
using IdList = std::vector<Id>;

class Store {
 public:
    // Above `ghosts` ghosts, only those with several children are kept.
    explicit Store(std::size_t ghosts) : index_(records_), slabs_(records_), ghost_limit_(ghosts) {}

    std::uint32_t add_extent(std::uint64_t bytes, std::uint64_t* generations, SlotNote* notes) {
        return slabs_.add_extent(bytes, generations, notes);
    }
    // Gives no slot of this extent to a block from now on.
    void retire(std::uint32_t extent) {
        need(extent < slabs_.extents(), "no such extent");
        slabs_.retire(extent);
    }
    // Evicts blocks of retired extents, at most `limit`: those with a frame that may be evicted, or
    // with `unframed` all that may be evicted.
    Left leave_retired(bool unframed, std::size_t limit);
    IdList ready_in_retired() const;
    // Notes call the space `name`.
    std::uint32_t add_space(std::vector<GroupSpec> groups, std::uint32_t name);
    bool drop_space(std::uint32_t space);  // false if it contains blocks

    // Queries. Blocks with a frame that a match finds count as used.
    Match match(std::uint32_t space, Keys keys);
    std::vector<Missing> missing(std::uint32_t space, Keys keys, std::size_t prefix) const;
    IdList resident(std::uint32_t space, Keys keys) const;
    void states(std::uint32_t space, Key key, char* answers) const;
    // `live`: a slot whose writer has lost its connection does not count as being written.
    void probe(std::uint32_t place, Keys keys, char* answers, bool live = false) const;
    IdList present(std::uint32_t place, Keys keys) const;
    IdList ancestors(std::uint32_t place, Key key, std::size_t limit) const;

    // Plans.
    std::uint64_t room(std::uint32_t space, std::uint32_t group) const;
    Left make_room(std::uint32_t space, std::uint32_t group, std::uint64_t n, Ids victims);
    // Starts or stops recording what make_room evicts by identity: the ids become invalid.
    void note_evicted(bool on);
    std::vector<Name> take_evicted() { return std::exchange(evicted_, {}); }
    // Finds a key that exists only at its turn; then the slots taken before it are given back, with
    // new generations.
    // The session `owner` writes them.
    IdList reserve(std::uint32_t place, std::optional<Key> parent, Keys keys, const char* statuses,
                   std::uint32_t owner, std::uint64_t expires_ms);

    // Takes over the blocks that the notes on these pages describe, the oldest first. `spaces` has
    // the number of each space by the name that notes call it. Before any other block.
    Adopted adopt(std::span<const NotedPages> pages,
                  const std::unordered_map<std::uint32_t, std::uint32_t>& spaces);

    // Events; each takes the whole batch or throws.
    void commit(Ids ids, const char* checksums);
    void abort(Ids ids);
    void quarantine(Ids ids);
    void gone(Ids ids);
    // Another session of the same client owns these slots, which it may still write to.
    void own(Ids ids, std::uint32_t owner);
    // The client writes on after its connection was lost.
    void regain(Ids ids);
    IdList evict(Ids ids);
    Left forget(Ids ids);
    void lease(Ids ids);
    std::pair<IdList, IdList> unlease(Ids ids);

    // The tiers below (tiers.cpp). Returns the ids whose frame came too late, or second.
    IdList framed(std::uint32_t tier, Ids ids, const char* frames, const char* digests);
    IdList moved(Ids ids, const char* before, const char* frames);
    std::size_t promote(Ids ids);  // how many: always the first ones
    std::pair<IdList, IdList> promoted(Ids ids, const char* checksums = nullptr);
    Left unpromoted(Ids ids);
    Left spoilt(Ids ids);
    Left damaged(Ids ids, const char* frames);
    IdList in_segment(std::uint32_t segment) const;
    IdList still(Ids ids, std::uint32_t segment) const;
    // Decides whether a block is copied when its segment is reused.
    bool earns_second_chance(Id id);
    // The frames of blocks that were used since the last call, of at most `limit` blocks.
    std::vector<Frame> take_used(std::size_t limit);
    Left drop_segment(std::uint32_t segment);
    // Takes the rows of a segment's footer. The frames at the pages in `used`, in ascending order,
    // were used since they were written.
    Restored restore(std::uint32_t tier, std::uint32_t space, const char* rows, std::size_t n,
                     std::uint32_t segment, std::span<const std::uint32_t> used);
    IdList dirty(Ids ids) const;
    // The READY blocks of these that have a frame: those in memory, or those that are only below.
    IdList clean(Ids ids, bool in_memory) const;
    IdList lossy(Ids ids) const;
    std::vector<std::uint32_t> depths(Ids ids) const;
    std::pair<IdList, bool> coldest(Ids ids, std::uint64_t within, std::uint64_t limit) const;
    const Frame& frame(Id id) const;

    // Copies of blocks in the memory of GPUs. Each memory has a number that is never reused, and
    // its own generations. Copies are reserved for leased blocks, and those leases last until
    // `end_copies`, which makes the copies visible or gives their slots back.
    std::uint32_t add_hot(std::uint64_t bytes, std::uint64_t* generations);
    void drop_hot(std::uint32_t number) { hot_.erase(number); }
    HotCopies& hot(std::uint32_t number) const;
    std::vector<CopyAnswer> reserve_copies(std::uint32_t number, Ids ids, bool evict);
    void end_copies(std::uint32_t number, Ids ids, bool good);
    // The blocks in memory with these slots, or `none`: another block may have the slot now.
    IdList at(std::span<const SlotAddress> slots) const;

    // For the records [first, first + look): a tally per space, and the blocks of one space, at
    // most `limit`. Both also return where to continue; 0 at the end.
    std::pair<Id, std::vector<Tally>> tally(Id first, Id look) const;
    std::pair<Id, IdList> listed(std::uint32_t space, Id first, Id look, std::size_t limit) const;

    // Single blocks.
    const Record& block(Id id) const;
    const Place& place_of(Id id) const { return places_[block(id).place]; }
    Id parent_of(Id id) const { return records_[records_.node_of(id)].parent; }
    // Identifies the block in all tiers; the same if it is saved again.
    std::uint64_t name_of(Id id) const {
        const std::uint32_t place = block(id).place;  // first: it checks the id
        return name_of(key_of(id).words[0], place - spaces_[places_[place].space].first_place[0]);
    }
    // From the first word of its key, and its place among those of its space.
    static std::uint64_t name_of(std::uint64_t word, std::uint64_t at) {
        return word + at * 0x9E3779B97F4A7C15;
    }
    // The block of the same group and shard before it in its chain, or `none`.
    Id previous_in_chain(Id id) const {
        const std::uint32_t place = block(id).place;
        Id above = parent_of(id);
        return above == none ? none : residency(above, place);
    }
    bool summed(Id id) const { return records_.summed(id); }
    const Key& key_of(Id id) const { return records_[records_.node_of(id)].key; }
    SlotAddress slot(Id id) const;
    const Checksum& checksum(Id id) const { return records_.checksum(id); }
    const Checksum& own_checksum(Id id) const { return records_.own_checksum(id); }
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
    // All ids that were ever used are below this.
    Id id_limit() const { return records_.limit(); }
    std::size_t memory_bytes() const;
    void check() const;

 private:
    // limit of the nodes that one call may cut, join or climb
    static constexpr std::size_t walk_limit = 65536;

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
        newly_used_.push_back(id);
    }
    static unsigned order_of(std::uint32_t places) { return std::bit_width(places - 1); }
    std::uint32_t make_places(std::uint32_t n);
    bool distinct(std::uint32_t space, Keys keys) const;
    template <class Visit>
    void each_node(std::uint32_t space, Keys keys, Visit visit) const;
    IdList adjacent_in_memory(std::uint32_t in, Keys keys);
    Id residency(Id node, std::uint32_t place) const;
    Id ready_at(Id node, std::uint32_t place) const;

    // The tree (tree.cpp).
    Id make_node(std::uint32_t space, const Key& key, std::uint64_t hash);
    void begin();
    void drop_idle(Id node);
    void set_parent(Id node, Id parent);
    bool complete(Id node) const;
    void cut_below(Id node, IdList* orphans);
    void join_below(Id node);
    template <class Passes>
    void set_cut_below(Id node, bool cut, Passes passes);
    void keep_orphans(IdList& ids) const;
    void check_node(Id node, Counts& seen) const;

    // Events. `change` moves each block to the state that `next` returns for it, or none if that is
    // `unused` for one of them. Returns the previous states.
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
                    "a block is in the wrong state, or no block has this id");
            }
            was.push_back(records_[ids[i]].is());
            records_[ids[i]].become(to);
        }
        begin();
        return was;
    }
    void transition(Ids ids, Event event);
    void tally(Id id, Status from, Status to);
    void arrived(Id id);
    void leave(Id id, State from, IdList* orphans);
    bool take_slot(Id id);
    void vacate(Id id);
    void free_slot(Id id, State from);
    void note_writing(Id id, Noted state, std::uint32_t owner, std::uint64_t expires_ms);
    void note_ready(Id id);
    std::optional<Id> adopt_one(const SlotNote& note, std::uint32_t place);
    Id attach(Id node, std::uint32_t place, Event event, std::uint32_t tier = memory);
    void detach(Id id);
    std::vector<State> end_reads(Ids ids, State to, State without_frame);
    void lose(Id id, Left& left);
    void evict_one(Id id, Left& left);
    void note_frame(Id id, const Frame& frame, const char* digest);
    bool is_frame_of(Id id, const Frame& frame, const char* digest) const;
    bool lies_in(Id id, std::uint32_t segment) const {
        return records_.known(id) && records_[id].framed && records_.frame(id).segment == segment;
    }

    Records records_;
    Index index_;
    Slabs slabs_;
    std::vector<Space> spaces_;  // no groups: the number is unused
    std::vector<Place> places_;
    std::vector<std::uint32_t> spare_spaces_;
    std::array<std::vector<std::uint32_t>, 25> spare_places_;  // runs of 2^n of them
    // The blocks of each segment in the order of their frames; some have left since.
    std::unordered_map<std::uint32_t, IdList> segments_;
    Counts counts_;
    IdList stack_;  // the stack of tree walks, kept for its memory
    bool recording_evicted_ = false;
    std::vector<Name> evicted_;
    IdList pending_ghosts_;  // ghosts that the next call checks
    IdList newly_used_;      // blocks used since the last `take_used`
    std::size_t ghost_limit_;
    std::uint64_t sequence_ = 0;  // of the last note
    std::size_t walked_ = 0, climbed_ = 0;
    bool cut_short_ = false;  // a walk reached its limit: some `cut` flags may be out of date
    std::map<std::uint32_t, std::unique_ptr<HotCopies>> hot_;
    std::uint32_t next_hot_ = 0;
};

}  // namespace kvtier
