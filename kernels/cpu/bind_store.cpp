// The Python bindings of the store: bytes in, bytes out, and the buffers of the generation tables.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bytes.h"
#include "python_bytes.h"
#include "store.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvtier;

namespace {

Keys keys_in(const nb::bytes& keys) {
    return {keys.c_str(), count_in(keys, key_bytes, "keys have 32 bytes each")};
}

Key key_in(const nb::bytes& key) {
    need(key.size() == key_bytes, "a key has 32 bytes");
    return Key::read(key.c_str());
}

nb::bytes zeroed(std::size_t size, char*& data) {
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (!made) throw nb::python_error();
    data = PyBytes_AS_STRING(made);
    std::memset(data, 0, size);
    return nb::steal<nb::bytes>(made);
}

// A row of `row_bytes` for each of these; `fill(one, row)` writes it over zeros.
template <class Many, class Fill>
nb::bytes rows(const Many& many, std::size_t row_bytes, Fill fill) {
    char* row;
    nb::bytes out = zeroed(std::size(many) * row_bytes, row);
    for (const auto& one : many) {
        fill(one, row);
        row += row_bytes;
    }
    return out;
}

// A number that exceeds 64 bits also fails every later check.
std::int64_t small(const nb::int_& number) {
    int overflow = 0;
    std::int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    need(!overflow, "a number is out of range");
    return value;
}

// The states of a block as its row in a list names them; `listed_below` is READY below memory.
constexpr std::array<char, Counts::states> listed_state{0, 1, 2, 3, 4, 6};
constexpr char listed_below = 5;

constexpr std::size_t identity_bytes = 80;

using TwoLists = std::pair<nb::bytes, nb::bytes>;
using ThreeLists = std::tuple<nb::bytes, nb::bytes, nb::bytes>;

// Segment and page of each frame, as 4-byte numbers.
nb::bytes places_out(const std::vector<Frame>& frames) {
    return rows(frames, 8, [](const Frame& frame, char* row) { std::memcpy(row, &frame, 8); });
}

const char* frames_in(const nb::bytes& frames, Ids ids) {
    need(frames.size() == ids.size() * sizeof(Frame), "need 16 bytes of frame per id");
    return frames.c_str();
}

// Null if there are none.
const char* checksums_in(const nb::bytes& checksums, Ids ids) {
    if (!checksums.size()) return nullptr;
    need(checksums.size() == ids.size() * checksum_bytes,
         "need 16 bytes of checksum per id, or no checksums");
    return checksums.c_str();
}

TwoLists two(const std::pair<IdList, IdList>& lists) {
    return {ids_out(lists.first), ids_out(lists.second)};
}

TwoLists two(const Left& left) { return {ids_out(left.gone), ids_out(left.orphans)}; }

// The store and the buffers that it writes to. Checks all arguments.
class PyStore {
 public:
    explicit PyStore(std::size_t ghosts) : store_(ghosts) {}

    std::uint32_t add_extent(std::uint64_t nbytes, nb::handle generations, nb::handle notes) {
        auto held = std::make_unique<HeldMemory>();
        std::uint64_t* generation = generations_in(*held, nbytes, generations);
        SlotNote* noted = nullptr;
        tables_.push_back(std::move(held));
        if (!notes.is_none()) {
            held = std::make_unique<HeldMemory>();
            held->take(notes, Access::kWrite, "notes");
            need(held->size() >= nbytes / page_bytes * sizeof(SlotNote) &&
                     reinterpret_cast<std::uintptr_t>(held->data()) % alignof(SlotNote) == 0,
                 "the notes need 128 aligned bytes a page");
            noted = reinterpret_cast<SlotNote*>(held->data());
            tables_.push_back(std::move(held));
        }
        return store_.add_extent(nbytes, generation, noted);
    }

    static std::size_t damaged_notes(nb::handle notes) {
        const HeldMemory held(notes, Access::kRead, "notes");
        need(reinterpret_cast<std::uintptr_t>(held.data()) % alignof(SlotNote) == 0,
             "the notes are not aligned");
        auto* first = reinterpret_cast<const SlotNote*>(held.data());
        return static_cast<std::size_t>(
            std::count_if(first, first + held.size() / sizeof(SlotNote),
                          [](const SlotNote& note) { return !note.is_whole(); }));
    }

    std::uint32_t add_space(const std::vector<std::tuple<nb::int_, nb::int_, nb::int_>>& groups,
                            const std::vector<nb::int_>& shards, std::uint32_t name) {
        need(groups.size() == shards.size(), "need one number of shards per group");
        std::vector<GroupSpec> specs;
        for (std::size_t g = 0; g < groups.size(); ++g) {
            std::int64_t kind = small(std::get<0>(groups[g])),
                         window = small(std::get<1>(groups[g]));
            std::int64_t block_bytes = small(std::get<2>(groups[g])), count = small(shards[g]);
            need(kind >= 0 && kind <= 2 && window >= 0 && !(window >> 32) && block_bytes > 0 &&
                     count > 0 && count <= 1 << 22,
                 "a group is (kind 0..2, window_blocks, block_bytes)");
            specs.push_back({static_cast<Kind>(kind), static_cast<std::uint32_t>(window),
                             static_cast<std::uint64_t>(block_bytes),
                             static_cast<std::uint32_t>(count)});
        }
        return store_.add_space(std::move(specs), name);
    }

    bool drop_space(std::uint32_t space) { return store_.drop_space(space); }

    std::uint64_t slot_bytes(std::uint32_t space, std::uint32_t group) const {
        return store_.slot_bytes(space, group);
    }

    nb::tuple match(std::uint32_t space, nb::bytes keys) {
        auto [ready, restorable, parts] = store_.match(space, keys_in(keys));
        nb::list found;
        for (const Part& part : parts)
            found.append(nb::make_tuple(part.group, part.shard, part.first, ids_out(part.ids)));
        return nb::make_tuple(ready, restorable, found);
    }

    nb::list missing(std::uint32_t space, nb::bytes keys, std::size_t prefix) const {
        nb::list found;
        for (const Missing& part : store_.missing(space, keys_in(keys), prefix))
            found.append(nb::make_tuple(part.group, part.shard, ids_out(part.below),
                                        ids_out(part.promoting)));
        return found;
    }

    nb::bytes resident(std::uint32_t space, nb::bytes keys) const {
        return ids_out(store_.resident(space, keys_in(keys)));
    }

    nb::bytes states(std::uint32_t space, nb::bytes key) const {
        char* answers;
        nb::bytes out = zeroed(store_.space(space).places, answers);
        store_.states(space, key_in(key), answers);
        return out;
    }

    nb::bytes probe(std::uint32_t space, std::uint32_t group, std::uint32_t shard, nb::bytes keys,
                    bool live) const {
        Keys list = keys_in(keys);
        std::uint32_t place = store_.place(space, group, shard);
        char* answers;
        nb::bytes out = zeroed(list.n, answers);
        store_.probe(place, list, answers, live);
        return out;
    }

    nb::bytes present(std::uint32_t space, std::uint32_t group, std::uint32_t shard,
                      nb::bytes keys) const {
        return ids_out(store_.present(store_.place(space, group, shard), keys_in(keys)));
    }

    nb::bytes ancestors(std::uint32_t space, std::uint32_t group, std::uint32_t shard,
                        nb::bytes key, std::size_t limit) const {
        return ids_out(store_.ancestors(store_.place(space, group, shard), key_in(key), limit));
    }

    std::uint64_t room(std::uint32_t space, std::uint32_t group, std::uint64_t n) const {
        return std::min(n, store_.room(space, group));
    }

    ThreeLists make_room(std::uint32_t space, std::uint32_t group, std::uint64_t n,
                         nb::bytes victims) {
        Left left = store_.make_room(space, group, n, ids_in(victims));
        return {ids_out(left.gone), ids_out(left.orphans), ids_out(left.below)};
    }

    void retire(std::uint32_t extent) { store_.retire(extent); }
    std::uint64_t retired_bytes(std::uint32_t extent) const {
        need(extent < store_.slabs().extents(), "no such extent");
        return store_.slabs().retired_bytes(extent);
    }
    nb::bytes ready_in_retired() const { return ids_out(store_.ready_in_retired()); }
    ThreeLists leave_retired(bool unframed, std::size_t limit) {
        Left left = store_.leave_retired(unframed, limit);
        return {ids_out(left.gone), ids_out(left.orphans), ids_out(left.below)};
    }

    void note_evicted(bool on) { store_.note_evicted(on); }

    // In the format of `identities`, without parents.
    nb::bytes take_evicted() {
        return rows(store_.take_evicted(), identity_bytes, [](const Name& name, char* row) {
            std::memcpy(row, &name, 12);
            std::memcpy(row + 16, name.key.words.data(), key_bytes);
        });
    }

    TwoLists reserve(std::uint32_t space, std::uint32_t group, std::uint32_t shard,
                     std::optional<nb::bytes> parent, nb::bytes keys, nb::bytes statuses,
                     std::uint32_t owner, std::uint64_t expires_ms) {
        Keys list = keys_in(keys);
        need(statuses.size() == list.n, "need one status per key");
        std::optional<Key> above;
        if (parent) above = key_in(*parent);
        IdList ids = store_.reserve(store_.place(space, group, shard), above, list,
                                    statuses.c_str(), owner, expires_ms);
        return {ids_out(ids), slots_of(ids)};
    }

    nb::tuple adopt(
        const std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>>& pages,
        const std::vector<std::pair<std::uint32_t, std::uint32_t>>& spaces) {
        std::vector<NotedPages> runs;
        for (auto [extent, first, count] : pages) {
            if (extent >= store_.slabs().extents()) throw std::out_of_range("no such extent");
            runs.push_back({extent, first, count});
        }
        Adopted adopted = store_.adopt(runs, {spaces.begin(), spaces.end()});
        return nb::make_tuple(ids_out(adopted.ready), adopted.expires_ms, ids_out(adopted.writing),
                              adopted.owners, adopted.dropped);
    }

    void commit(nb::bytes ids, nb::bytes checksums) {
        store_.commit(ids_in(ids), checksums_in(checksums, ids_in(ids)));
    }

    void abort(nb::bytes ids) { store_.abort(ids_in(ids)); }
    void quarantine(nb::bytes ids) { store_.quarantine(ids_in(ids)); }
    void gone(nb::bytes ids) { store_.gone(ids_in(ids)); }
    void own(nb::bytes ids, std::uint32_t owner) { store_.own(ids_in(ids), owner); }
    void regain(nb::bytes ids) { store_.regain(ids_in(ids)); }
    nb::bytes evict(nb::bytes ids) { return ids_out(store_.evict(ids_in(ids))); }
    ThreeLists forget(nb::bytes ids) { return and_died(store_.forget(ids_in(ids))); }
    void lease(nb::bytes ids) { store_.lease(ids_in(ids)); }
    TwoLists unlease(nb::bytes ids) { return two(store_.unlease(ids_in(ids))); }
    std::size_t ready(nb::bytes ids) const {
        Ids list = ids_in(ids);
        return static_cast<std::size_t>(std::count_if(
            list.begin(), list.end(), [&](Id id) { return store_.block(id).in_memory(); }));
    }
    nb::bytes slots(nb::bytes ids) const { return slots_of(ids_in(ids)); }

    nb::bytes framed(std::uint32_t tier, nb::bytes ids, nb::bytes frames, nb::bytes checksums) {
        Ids list = ids_in(ids);
        return ids_out(
            store_.framed(tier, list, frames_in(frames, list), checksums_in(checksums, list)));
    }

    nb::bytes moved(nb::bytes ids, nb::bytes before, nb::bytes frames) {
        Ids list = ids_in(ids);
        return ids_out(store_.moved(list, frames_in(before, list), frames_in(frames, list)));
    }

    TwoLists promote(nb::bytes ids) {
        Ids taken = ids_in(ids);
        taken = taken.first(store_.promote(taken));
        return {nb::bytes(taken.data(), taken.size_bytes()), slots_of(taken)};
    }

    TwoLists promoted(nb::bytes ids, nb::bytes checksums) {
        return two(store_.promoted(ids_in(ids), checksums_in(checksums, ids_in(ids))));
    }
    TwoLists unpromoted(nb::bytes ids) { return two(store_.unpromoted(ids_in(ids))); }
    ThreeLists spoilt(nb::bytes ids) { return and_died(store_.spoilt(ids_in(ids))); }
    ThreeLists damaged(nb::bytes ids, nb::bytes frames) {
        Ids list = ids_in(ids);
        return and_died(store_.damaged(list, frames_in(frames, list)));
    }

    TwoLists frames(nb::bytes ids) const {
        auto packed = [this](Id id, char* row) {
            Frame frame = store_.frame(id);
            frame.tier = frame.has_own = frame.rounds = frame.zero = 0;
            std::memcpy(row, &frame, sizeof(Frame));
        };
        auto digest = [this](Id id, char* row) {
            std::memcpy(row, store_.checksum(id).bytes.data(), checksum_bytes);
        };
        return {rows(ids_in(ids), sizeof(Frame), packed),
                rows(ids_in(ids), checksum_bytes, digest)};
    }

    nb::bytes dirty(nb::bytes ids) const { return ids_out(store_.dirty(ids_in(ids))); }
    nb::bytes clean(nb::bytes ids, bool in_memory) const {
        return ids_out(store_.clean(ids_in(ids), in_memory));
    }
    nb::bytes lossy(nb::bytes ids) const { return ids_out(store_.lossy(ids_in(ids))); }
    nb::bytes depths(nb::bytes ids) const { return ids_out(store_.depths(ids_in(ids))); }

    std::pair<nb::bytes, bool> coldest(nb::bytes ids, std::uint64_t within_bytes,
                                       std::uint64_t limit_bytes) const {
        auto [found, enough] = store_.coldest(ids_in(ids), within_bytes, limit_bytes);
        return {ids_out(found), enough};
    }

    TwoLists in_segment(std::uint32_t segment, bool look) {
        IdList ids = store_.in_segment(segment);
        auto flags = [&](Id id, char* row) {
            const Record& record = store_.block(id);
            const bool before = !look && store_.frame(id).rounds;
            const bool wanted = look ? store_.earns_second_chance(id) : record.used;
            *row = static_cast<char>(wanted | (record.tier != memory) << 1 | before << 2);
        };
        return {ids_out(ids), rows(ids, 1, flags)};
    }

    nb::bytes still(nb::bytes ids, std::uint32_t segment) const {
        return ids_out(store_.still(ids_in(ids), segment));
    }

    nb::bytes take_used(std::size_t limit) { return places_out(store_.take_used(limit)); }

    TwoLists drop_segment(std::uint32_t segment) { return two(store_.drop_segment(segment)); }

    std::tuple<std::size_t, std::size_t, nb::bytes> restore(std::uint32_t tier, std::uint32_t space,
                                                            nb::bytes rows, std::uint32_t segment,
                                                            nb::bytes used) {
        const std::size_t n = count_in(rows, 128, "rows have 128 bytes each");
        const Restored over = store_.restore(tier, space, rows.c_str(), n, segment, ids_in(used));
        return {over.made, over.unfit, places_out(over.died)};
    }

    // "<IIIB3x32s32s": space, group, shard, whether there is a parent, key, key of the parent.
    nb::bytes identities(nb::bytes ids) const {
        return rows(ids_in(ids), identity_bytes, [this](Id id, char* row) {
            const Place& place = store_.place_of(id);
            Id parent = store_.parent_of(id);
            std::memcpy(row, &place, 12);
            row[12] = parent != none;
            std::memcpy(row + 16, store_.key_of(id).words.data(), key_bytes);
            if (parent != none)
                std::memcpy(row + 48, store_.key_of(parent).words.data(), key_bytes);
        });
    }

    TwoLists checksums(nb::bytes ids) const {
        auto digest = [this](Id id, char* row) {
            store_.block(id);
            if (store_.summed(id))
                std::memcpy(row, store_.own_checksum(id).bytes.data(), checksum_bytes);
        };
        auto has = [this](Id id, char* row) { *row = store_.summed(id); };
        return {rows(ids_in(ids), checksum_bytes, digest), rows(ids_in(ids), 1, has)};
    }

    nb::bytes keys_of(nb::bytes ids) const {
        return rows(ids_in(ids), key_bytes, [this](Id id, char* row) {
            store_.block(id);
            std::memcpy(row, store_.key_of(id).words.data(), key_bytes);
        });
    }

    // The input of a policy: the names of the blocks, 8 bytes each, and the ids of the blocks
    // before them.
    static nb::bytes names_of_keys(nb::bytes keys, std::uint32_t at) {
        Keys list = keys_in(keys);
        char* data;
        nb::bytes out = zeroed(list.n * 8, data);
        for (std::size_t i = 0; i < list.n; ++i) {
            std::uint64_t word;
            std::memcpy(&word, keys.c_str() + i * key_bytes, 8);
            const std::uint64_t name = Store::name_of(word, at);
            std::memcpy(data + i * 8, &name, 8);
        }
        return out;
    }

    nb::bytes names(nb::bytes ids) const {
        return of_each(ids_in(ids), [this](Id id) -> std::uint64_t { return store_.name_of(id); });
    }

    nb::bytes parents(nb::bytes ids) const {
        IdList above;
        for (Id id : ids_in(ids)) above.push_back(store_.previous_in_chain(id));
        return ids_out(above);
    }

    nb::dict counts() const {
        const Counts& counts = store_.counts();
        nb::dict blocks, bytes, all;
        nb::list below;
        for (std::size_t i = 1; i < Counts::states; ++i) {
            blocks[state_names[i]] = counts.blocks[i];
            bytes[state_names[i]] = counts.bytes[i];
        }
        for (std::size_t i = Counts::states; i < counts.blocks.size(); ++i)
            below.append(counts.blocks[i]);
        all["blocks"] = blocks;
        all["bytes"] = bytes;
        all["below"] = below;
        all["framed_blocks"] = store_.framed_blocks();
        all["framed_bytes"] = store_.framed_bytes();
        all["nodes"] = counts.nodes;
        all["ghosts"] = counts.ghosts;
        all["capacity_bytes"] = store_.slabs().capacity_bytes();
        all["free_bytes"] = store_.slabs().free_bytes();
        return all;
    }

    std::uint32_t add_hot(std::uint64_t nbytes, nb::handle generations) {
        auto held = std::make_unique<HeldMemory>();
        std::uint64_t* generation = generations_in(*held, nbytes, generations);
        const std::uint32_t number = store_.add_hot(nbytes, generation);
        hot_tables_[number] = std::move(held);
        return number;
    }
    void drop_hot(std::uint32_t number) {
        store_.hot(number);
        store_.drop_hot(number);
        hot_tables_.erase(number);
    }
    TwoLists reserve_copies(std::uint32_t number, nb::bytes ids, bool evict) {
        const Ids list = ids_in(ids);
        const std::vector<CopyAnswer> answers = store_.reserve_copies(number, list, evict);
        IdList granted;
        for (std::size_t i = 0; i < list.size(); ++i)
            if (answers[i] == CopyAnswer::granted) granted.push_back(list[i]);
        const HotCopies& copies = store_.hot(number);
        auto place = [&](Id id, char* row) {
            const SlotAddress slot = copies.slot(id);
            std::memcpy(row, &slot, sizeof slot);
        };
        return {nb::bytes(answers.data(), answers.size()),
                rows(granted, sizeof(SlotAddress), place)};
    }
    void end_copies(std::uint32_t number, nb::bytes ids, bool good) {
        store_.end_copies(number, ids_in(ids), good);
    }
    // A slot per block, or zeros. Its generation is never 0.
    nb::bytes copies(std::uint32_t number, nb::bytes ids, bool use) {
        HotCopies& copies = store_.hot(number);
        return rows(ids_in(ids), sizeof(SlotAddress), [&](Id id, char* row) {
            if (!copies.has(id)) return;
            if (use) copies.use(id);
            const SlotAddress slot = copies.slot(id);
            std::memcpy(row, &slot, sizeof slot);
        });
    }
    nb::bytes at(nb::bytes slots) const {
        const std::size_t n = count_in(slots, sizeof(SlotAddress), "slots have 24 bytes each");
        std::vector<SlotAddress> list(n);
        if (n) std::memcpy(list.data(), slots.c_str(), slots.size());
        return ids_out(store_.at(list));
    }
    nb::dict hot_counts(std::uint32_t number) const {
        const HotCopies& copies = store_.hot(number);
        nb::dict all;
        all["blocks"] = copies.blocks();
        all["writing"] = copies.writing();
        all["capacity_bytes"] = copies.capacity_bytes();
        all["used_bytes"] = copies.used_bytes();
        all["evicted"] = copies.evicted();
        return all;
    }

    std::pair<Id, nb::bytes> tally(Id first, Id look) const {
        auto [next, found] = store_.tally(first, look);
        return {next, nb::bytes(found.data(), found.size() * sizeof(Tally))};
    }

    nb::tuple listed(std::uint32_t space, Id first, Id look, std::size_t limit) const {
        auto [next, ids] = store_.listed(space, first, look, limit);
        constexpr std::size_t listed_bytes = 56;
        auto listed = [this](Id id, char* row) {
            const Record& record = store_.block(id);
            const Place& place = store_.place_of(id);
            const Frame frame = record.framed ? store_.frame(id) : Frame{};
            const std::uint32_t head[] = {id, place.group, place.shard, frame.payload_bytes};
            std::memcpy(row, head, sizeof head);
            std::memcpy(row + 16, &record.leases, sizeof record.leases);
            row[18] = record.tier == memory ? listed_state[record.state] : listed_below;
            row[19] = static_cast<char>(record.framed | record.used << 1);
            row[20] = static_cast<char>(frame.codec);
            row[21] = static_cast<char>(frame.rounds & ~spared);
            std::memcpy(row + 24, store_.key_of(id).words.data(), key_bytes);
        };
        return nb::make_tuple(next, rows(ids, listed_bytes, listed));
    }

    Id id_limit() const { return store_.id_limit(); }
    std::size_t memory_bytes() const { return sizeof(*this) + store_.memory_bytes(); }

    void check() const {
        try {
            store_.check();
        } catch (const std::logic_error& error) {
            PyErr_SetString(PyExc_AssertionError, error.what());
            throw nb::python_error();
        }
    }

 private:
    static std::uint64_t* generations_in(HeldMemory& held, std::uint64_t nbytes,
                                         nb::handle generations) {
        held.take(generations, Access::kWrite, "generations");
        need(nbytes >= page_bytes && !(nbytes >> 44),
             "an extent has between 4096 bytes and 16 TiB");
        need(held.size() >= nbytes / page_bytes * sizeof(std::uint64_t),
             "the generation table needs 8 bytes a page");
        need(reinterpret_cast<std::uintptr_t>(held.data()) % alignof(std::uint64_t) == 0,
             "the generation table is not aligned to 8 bytes");
        return reinterpret_cast<std::uint64_t*>(held.data());
    }

    static ThreeLists and_died(const Left& left) {
        return {ids_out(left.gone), ids_out(left.orphans), places_out(left.died)};
    }

    // What `of` returns for each of these blocks, whose records it reads.
    template <class Of>
    nb::bytes of_each(Ids ids, Of of) const {
        using One = std::invoke_result_t<Of, Id>;
        char* data;
        nb::bytes out = zeroed(ids.size() * sizeof(One), data);
        for (std::size_t i = 0; i < ids.size(); ++i) {
            if (i + 8 < ids.size()) store_.prefetch(ids[i + 8]);
            const One one = of(ids[i]);
            std::memcpy(data + i * sizeof(One), &one, sizeof(One));
        }
        return out;
    }

    nb::bytes slots_of(Ids ids) const {
        return of_each(ids, [this](Id id) { return store_.slot(id); });
    }

    Store store_;
    std::vector<std::unique_ptr<HeldMemory>> tables_;  // of generations, which the store writes
    std::map<std::uint32_t, std::unique_ptr<HeldMemory>> hot_tables_;
};

}  // namespace

void bind_store(nb::module_& m) {
    nb::class_<PyStore>(m, "Store", "One tenant's blocks: the prefix tree, their states and slots.")
        .def(nb::init<std::size_t>(), "ghosts"_a = 65536)
        .def("add_extent", &PyStore::add_extent, "nbytes"_a, "generations"_a,
             "notes"_a = nb::none())
        .def("add_space", &PyStore::add_space, "groups"_a, "shards"_a, "name"_a = 0)
        .def("drop_space", &PyStore::drop_space, "space"_a)
        .def("slot_bytes", &PyStore::slot_bytes, "space"_a, "group"_a)
        .def("match", &PyStore::match, "space"_a, "keys"_a)
        .def("missing", &PyStore::missing, "space"_a, "keys"_a, "prefix"_a)
        .def("resident", &PyStore::resident, "space"_a, "keys"_a)
        .def("states", &PyStore::states, "space"_a, "key"_a)
        .def("probe", &PyStore::probe, "space"_a, "group"_a, "shard"_a, "keys"_a, "live"_a = false)
        .def("present", &PyStore::present, "space"_a, "group"_a, "shard"_a, "keys"_a)
        .def("ancestors", &PyStore::ancestors, "space"_a, "group"_a, "shard"_a, "key"_a, "limit"_a)
        .def("names", &PyStore::names, "ids"_a)
        .def_static("damaged_notes", &PyStore::damaged_notes, "notes"_a)
        .def_static("names_of_keys", &PyStore::names_of_keys, "keys"_a, "at"_a)
        .def("parents", &PyStore::parents, "ids"_a)
        .def("room", &PyStore::room, "space"_a, "group"_a, "n"_a)
        .def("make_room", &PyStore::make_room, "space"_a, "group"_a, "n"_a, "victims"_a)
        .def("retire", &PyStore::retire, "extent"_a)
        .def("retired_bytes", &PyStore::retired_bytes, "extent"_a)
        .def("ready_in_retired", &PyStore::ready_in_retired)
        .def("leave_retired", &PyStore::leave_retired, "unframed"_a, "limit"_a)
        .def("note_evicted", &PyStore::note_evicted, "on"_a)
        .def("take_evicted", &PyStore::take_evicted)
        .def("reserve", &PyStore::reserve, "space"_a, "group"_a, "shard"_a, "parent"_a.none(),
             "keys"_a, "statuses"_a, "owner"_a = 0, "expires_ms"_a = 0)
        .def("adopt", &PyStore::adopt, "pages"_a, "spaces"_a)
        .def("commit", &PyStore::commit, "ids"_a, "checksums"_a)
        .def("abort", &PyStore::abort, "ids"_a)
        .def("quarantine", &PyStore::quarantine, "ids"_a)
        .def("gone", &PyStore::gone, "ids"_a)
        .def("own", &PyStore::own, "ids"_a, "owner"_a)
        .def("regain", &PyStore::regain, "ids"_a)
        .def("evict", &PyStore::evict, "ids"_a)
        .def("forget", &PyStore::forget, "ids"_a)
        .def("lease", &PyStore::lease, "ids"_a)
        .def("unlease", &PyStore::unlease, "ids"_a)
        .def("framed", &PyStore::framed, "tier"_a, "ids"_a, "frames"_a, "checksums"_a)
        .def("moved", &PyStore::moved, "ids"_a, "before"_a, "frames"_a)
        .def("promote", &PyStore::promote, "ids"_a)
        .def("promoted", &PyStore::promoted, "ids"_a, "checksums"_a = nb::bytes("", 0))
        .def("unpromoted", &PyStore::unpromoted, "ids"_a)
        .def("spoilt", &PyStore::spoilt, "ids"_a)
        .def("damaged", &PyStore::damaged, "ids"_a, "frames"_a)
        .def("frames", &PyStore::frames, "ids"_a)
        .def("dirty", &PyStore::dirty, "ids"_a)
        .def("clean", &PyStore::clean, "ids"_a, "in_memory"_a)
        .def("coldest", &PyStore::coldest, "ids"_a, "within_bytes"_a, "limit_bytes"_a)
        .def("in_segment", &PyStore::in_segment, "segment"_a, "look"_a = false)
        .def("lossy", &PyStore::lossy, "ids"_a)
        .def("depths", &PyStore::depths, "ids"_a)
        .def("still", &PyStore::still, "ids"_a, "segment"_a)
        .def("take_used", &PyStore::take_used, "limit"_a)
        .def("drop_segment", &PyStore::drop_segment, "segment"_a)
        .def("restore", &PyStore::restore, "tier"_a, "space"_a, "rows"_a, "segment"_a,
             "used"_a = nb::bytes("", 0))
        .def("identities", &PyStore::identities, "ids"_a)
        .def("ready", &PyStore::ready, "ids"_a)
        .def("slots", &PyStore::slots, "ids"_a)
        .def("checksums", &PyStore::checksums, "ids"_a)
        .def("keys_of", &PyStore::keys_of, "ids"_a)
        .def("add_hot", &PyStore::add_hot, "nbytes"_a, "generations"_a)
        .def("drop_hot", &PyStore::drop_hot, "number"_a)
        .def("reserve_copies", &PyStore::reserve_copies, "number"_a, "ids"_a, "evict"_a)
        .def("end_copies", &PyStore::end_copies, "number"_a, "ids"_a, "good"_a)
        .def("copies", &PyStore::copies, "number"_a, "ids"_a, "use"_a)
        .def("at", &PyStore::at, "slots"_a)
        .def("hot_counts", &PyStore::hot_counts, "number"_a)
        .def("tally", &PyStore::tally, "first"_a, "look"_a)
        .def("listed", &PyStore::listed, "space"_a, "first"_a, "look"_a, "limit"_a)
        .def("counts", &PyStore::counts)
        .def("id_limit", &PyStore::id_limit)
        .def("memory_bytes", &PyStore::memory_bytes)
        .def("check", &PyStore::check);
}
