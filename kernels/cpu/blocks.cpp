// Copies blocks into and out of slots: whole buffers, or pieces of an engine's paged cache.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "copy.h"
#include "mapping.h"
#include "parallel.h"
#include "python_bytes.h"
#include "unlocked.h"
#include "xxh3.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr size_t kMostThreads = 256;
constexpr int kMostNice = 19;

// Smaller pieces are copied with ordinary stores: partial lines are a large share of them.
constexpr size_t kStreamPieceLeast = 512;

size_t checked_threads(long threads) {
    if (threads < 1) throw nb::value_error("threads: must be at least 1");
    return std::min(static_cast<size_t>(threads), kMostThreads);
}

// Copies n blocks of `bytes` each. pieces(i, sink) calls sink(dst, src, n, next) for the pieces of
// block i in order; next is where the source continues, or null. `digests`, if not null, gets one
// digest per block. One thread copies a whole block, unless there are few blocks and no digests.
template <typename Pieces>
void copy_blocks(size_t n, uint64_t bytes, size_t threads, int nice, uint8_t* digests,
                 const Pieces& pieces) {
    const bool big = n * bytes >= kStreamLeast;
    const auto plain = [big](uint8_t* dst, const uint8_t* src, size_t count, const uint8_t* next) {
        if (big && count >= kStreamPieceLeast) {
            stream_copy(dst, src, count, next);
        } else if (count != 0) {
            std::memcpy(dst, src, count);
        }
    };
    const auto fence = [] { stream_fence(); };
    if (!big) threads = 1;
    if (digests != nullptr) {
        in_parallel(
            n, threads, nice,
            [&](size_t i) {
                DigestedCopy copy(bytes, big);
                pieces(i, [&](uint8_t* dst, const uint8_t* src, size_t count, const uint8_t* next) {
                    copy.add(dst, src, count, next);
                });
                copy.finish(digests + kDigestBytes * i);
            },
            fence);
        return;
    }
    if (threads == 1 || n >= 4 * threads) {
        in_parallel(n, threads, nice, [&](size_t i) { pieces(i, plain); }, fence);
        return;
    }
    constexpr uint64_t kPartLeast = 256 * 1024;
    const uint64_t wanted = std::max<uint64_t>(1, 4 * threads / std::max<size_t>(n, 1));
    const uint64_t part = std::max(kPartLeast, (bytes / wanted + kPage - 1) / kPage * kPage);
    const size_t parts = static_cast<size_t>((bytes + part - 1) / part);
    in_parallel(
        n * parts, threads, nice,
        [&](size_t unit) {
            const uint64_t low = unit % parts * part, high = std::min(bytes, low + part);
            uint64_t at = 0;
            pieces(unit / parts,
                   [&](uint8_t* dst, const uint8_t* src, size_t count, const uint8_t* next) {
                       const uint64_t from = std::max(at, low), to = std::min(at + count, high);
                       if (from < to) {
                           plain(dst + (from - at), src + (from - at), to - from,
                                 to == at + count ? next : nullptr);
                       }
                       at += count;
                   });
        },
        fence);
}

// The buffers of the blocks [first, first + count) of `bytes` each: a list of buffers, or one
// buffer for all blocks. `exact` forbids more bytes.
class Buffers {
 public:
    Buffers(nb::handle given, size_t first, size_t count, uint64_t bytes, bool writable, bool exact)
        : count_(count), bytes_(bytes), writable_(writable) {
        if (first > kMost || count > kMost) throw nb::value_error("buffers: too many");
        if (bytes != 0 && first + count > std::numeric_limits<size_t>::max() / bytes) {
            throw nb::value_error("buffers: too many bytes");
        }
        const char* what = writable ? "target" : "source";
        const Access access = writable ? Access::kWrite : Access::kRead;
        PyObject* const from = given.ptr();
        several_ = PyList_Check(from) || PyTuple_Check(from);
        if (!several_) {
            held_ = std::make_unique<HeldMemory[]>(1);
            held_[0].take(given, access, what);
            check(held_[0].size(), (first + count) * bytes, exact, std::string(what) + "s",
                  "bytes");
            start_ = held_[0].data() + first * bytes;
            return;
        }
        // A private tuple: an exporter may run Python code that changes the list.
        const nb::object items = nb::steal(PySequence_Tuple(from));
        if (!items.is_valid()) nb::raise_python_error();
        const auto given_count = static_cast<size_t>(PyTuple_GET_SIZE(items.ptr()));
        check(given_count, first + count, exact, std::string(what) + "s", "buffers");
        held_ = std::make_unique<HeldMemory[]>(count);
        for (size_t i = 0; i < count; i++) {
            const size_t number = first + i;
            held_[i].take(PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(number)), access,
                          what, number);
            check(held_[i].size(), bytes, true, std::string(what) + " " + std::to_string(number),
                  "bytes");
        }
    }

    size_t count() const { return count_; }
    uint64_t bytes() const { return bytes_; }
    bool writable() const { return writable_; }
    uint8_t* at(size_t i) const { return several_ ? held_[i].data() : start_ + i * bytes_; }

 private:
    static constexpr size_t kMost = size_t{1} << 32;

    static void check(uint64_t has, uint64_t wanted, bool exact, const std::string& what,
                      const char* unit) {
        if (has == wanted || (!exact && has > wanted)) return;
        fail(nb::value_error, what, ": ", has, " ", unit, ", not ", wanted);
    }

    size_t count_;
    uint64_t bytes_;
    bool writable_;
    bool several_ = false;
    std::unique_ptr<HeldMemory[]> held_;
    uint8_t* start_ = nullptr;
};

std::vector<uint8_t*> places(Slots& slots, uint64_t bytes, bool writable) {
    std::vector<uint8_t*> all(slots.count());
    for (size_t i = 0; i < all.size(); i++) all[i] = slots.place(i, bytes, writable);
    return all;
}

nb::bytes copy_whole(nb::handle mappings, nb::handle packed, const Buffers& buffers,
                     nb::handle numbers, long threads, bool checksum, bool inwards) {
    const size_t most = checked_threads(threads);
    const uint64_t bytes = buffers.bytes();
    if (!inwards && !buffers.writable()) throw nb::value_error("targets: a buffer is read-only");
    Slots slots(mappings, packed);
    const std::vector<uint8_t*> at = places(slots, bytes, inwards);
    std::vector<uint32_t> which;
    if (!numbers.is_none()) which = read_u32(numbers, "at", true);
    const size_t matched = numbers.is_none() ? buffers.count() : which.size();
    if (matched != at.size()) {
        fail(nb::value_error, matched, " buffers for ", at.size(), " slots");
    }
    for (const uint32_t number : which) {
        if (number >= buffers.count()) {
            fail(nb::index_error, "at: buffer ", number, " of ", buffers.count());
        }
    }
    NewBytes digests(checksum ? kDigestBytes * at.size() : 0);
    {
        const Unlocked unlocked;
        copy_blocks(at.size(), bytes, most, 0, checksum ? digests.data() : nullptr,
                    [&](size_t i, const auto& sink) {
                        uint8_t* const buffer = buffers.at(which.empty() ? i : which[i]);
                        uint8_t* const to = inwards ? at[i] : buffer;
                        sink(to, inwards ? buffer : at[i], static_cast<size_t>(bytes), nullptr);
                    });
    }
    return digests.object;
}

// The same `each` bytes from each of these places of every block.
struct Parts {
    Parts(const std::vector<uint64_t>& starts, uint64_t each) : starts(starts), each(each) {
        if (starts.empty() || each == 0) throw nb::value_error("parts: none");
        const uint64_t last = *std::max_element(starts.begin(), starts.end());
        if (last > kMost || each > kMost) throw nb::value_error("parts: too many bytes");
        end = last + each;
    }

    static constexpr uint64_t kMost = uint64_t{1} << 31;  // products with 32 bits fit
    const std::vector<uint64_t>& starts;
    uint64_t each, end;
};

void check_targets(const Buffers& targets, size_t count, uint64_t bytes) {
    if (!targets.writable()) throw nb::value_error("targets: a buffer is read-only");
    if (targets.count() != count || targets.bytes() != bytes) {
        fail(nb::value_error, targets.count(), " targets of ", targets.bytes(), " bytes, not ",
             count, " of ", bytes);
    }
}

void copy_parts(nb::handle mappings, nb::handle packed, const std::vector<uint64_t>& starts,
                uint64_t each, const Buffers& targets, long threads) {
    const size_t most = checked_threads(threads);
    const Parts parts(starts, each);
    Slots slots(mappings, packed);
    check_targets(targets, slots.count(), starts.size() * each);
    const std::vector<uint8_t*> at = places(slots, parts.end, false);
    const Unlocked unlocked;
    copy_blocks(at.size(), targets.bytes(), most, 0, nullptr, [&](size_t i, const auto& sink) {
        const uint8_t* const after = at[i + 1 < at.size() ? i + 1 : i] + starts[0];
        uint8_t* to = targets.at(i);
        for (size_t j = 0; j < starts.size(); j++, to += each) {
            const bool last = j + 1 == starts.size();
            sink(to, at[i] + starts[j], static_cast<size_t>(each),
                 last ? after : at[i] + starts[j + 1]);
        }
    });
}

bool copy_tokens(nb::handle mappings, nb::handle packed, const std::vector<uint64_t>& starts,
                 uint64_t each, nb::handle tokens, uint32_t block_tokens, uint64_t first,
                 const Buffers& targets, long threads) {
    const size_t most = checked_threads(threads);
    if (block_tokens == 0) throw nb::value_error("block_tokens: must be at least 1");
    const std::vector<uint32_t> wanted = read_u32(tokens, "tokens", true);
    const Parts parts(starts, each);
    Slots slots(mappings, packed);
    check_targets(targets, starts.size(), wanted.size() * each);
    const uint64_t bytes = parts.end + each * (block_tokens - uint64_t{1});
    const std::vector<uint8_t*> at = places(slots, bytes, false);
    // Tokens that follow each other in memory, and in the targets.
    struct Run {
        const uint8_t* from;
        size_t bytes;
    };
    std::vector<Run> runs;
    runs.reserve(wanted.size());
    for (const uint32_t one : wanted) {
        if (one < first || (one - first) / block_tokens >= at.size()) return false;
        const uint64_t token = one - first;
        const uint8_t* const from = at[token / block_tokens] + token % block_tokens * each;
        if (!runs.empty() && from == runs.back().from + runs.back().bytes) {
            runs.back().bytes += each;
        } else {
            runs.push_back({from, static_cast<size_t>(each)});
        }
    }
    const Unlocked unlocked;
    copy_blocks(starts.size(), targets.bytes(), most, 0, nullptr, [&](size_t j, const auto& sink) {
        uint8_t* to = targets.at(j);
        for (size_t k = 0; k < runs.size(); k++) {
            const uint8_t* const next = runs[k + 1 < runs.size() ? k + 1 : k].from;
            sink(to, runs[k].from + starts[j], runs[k].bytes, next + starts[j]);
            to += runs[k].bytes;
        }
    });
    return true;
}

// Where the pieces of an engine's paged blocks are.
class EnginePieces {
 public:
    EnginePieces(nb::sequence arrays, const std::vector<int64_t>& offsets,
                 const std::vector<int64_t>& strides, const std::vector<int64_t>& piece_bytes);

    uint64_t block_bytes() const { return block_bytes_; }
    uint64_t blocks() const { return blocks_; }
    bool writable() const { return writable_; }

    // Calls sink(data, bytes, next) for each piece of a block; next is the address of the following
    // piece, for the last piece the first one of the block `after`.
    template <typename Sink>
    void each(uint32_t block, uint32_t after, const Sink& sink) const {
        for (size_t j = 0; j < pieces_.size(); j++) {
            const bool last = j + 1 == pieces_.size();
            sink(pieces_[j].at(block), pieces_[j].bytes,
                 last ? pieces_[0].at(after) : pieces_[j + 1].at(block));
        }
    }

 private:
    struct Piece {
        uint8_t* data;
        uint64_t stride;
        size_t bytes;

        uint8_t* at(uint32_t block) const { return data + uint64_t{block} * stride; }
    };

    std::unique_ptr<HeldMemory[]> held_;
    std::vector<Piece> pieces_;
    uint64_t block_bytes_ = 0;
    uint64_t blocks_ = uint64_t{1} << 32;  // ids have 32 bits
    bool writable_ = true;
};

EnginePieces::EnginePieces(nb::sequence arrays, const std::vector<int64_t>& offsets,
                           const std::vector<int64_t>& strides,
                           const std::vector<int64_t>& piece_bytes) {
    const nb::object items = nb::steal(PySequence_Tuple(arrays.ptr()));
    if (!items.is_valid()) nb::raise_python_error();
    const auto n = static_cast<size_t>(PyTuple_GET_SIZE(items.ptr()));
    if (n == 0 || offsets.size() != n || strides.size() != n || piece_bytes.size() != n) {
        throw nb::value_error(
            "pieces: need one array, offset, stride and size per piece, and at least one piece");
    }
    held_ = std::make_unique<HeldMemory[]>(n);
    pieces_.reserve(n);
    for (size_t j = 0; j < n; j++) {
        held_[j].take(PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(j)),
                      Access::kWriteIfAllowed, "array", j, Shape::kDense);
        const auto offset = static_cast<uint64_t>(offsets[j]);
        const auto stride = static_cast<uint64_t>(strides[j]);
        const auto bytes = static_cast<uint64_t>(piece_bytes[j]);
        const uint64_t size = held_[j].size();
        const std::string name = "piece " + std::to_string(j);
        if (offsets[j] < 0 || piece_bytes[j] < 1 || offset > size || bytes > size - offset) {
            fail(nb::value_error, name, ": ", piece_bytes[j], " bytes at ", offsets[j],
                 " of an array of ", size);
        }
        if (strides[j] < piece_bytes[j]) {
            fail(nb::value_error, name, ": a stride below its length would let blocks overlap");
        }
        pieces_.push_back({held_[j].data() + offset, stride, static_cast<size_t>(bytes)});
        blocks_ = std::min(blocks_, (size - offset - bytes) / stride + 1);
        block_bytes_ += bytes;
        writable_ = writable_ && held_[j].writable();
    }
}

template <bool kInwards>
nb::bytes copy_pieces(const EnginePieces& pieces, nb::handle block_ids, nb::handle mappings,
                      nb::handle packed, long threads, bool checksum, int nice) {
    const size_t most = checked_threads(threads);
    if (nice < 0 || nice > kMostNice) throw nb::value_error("nice: must be 0 to 19");
    const std::vector<uint32_t> ids = read_u32(block_ids, "block_ids", true);
    Slots slots(mappings, packed);
    if (ids.size() != slots.count()) {
        fail(nb::value_error, ids.size(), " block ids for ", slots.count(), " slots");
    }
    for (size_t i = 0; i < ids.size(); i++) {
        if (ids[i] >= pieces.blocks()) {
            fail(nb::index_error, "block_ids: number ", i, ": block ", ids[i], " of ",
                 pieces.blocks());
        }
    }
    if (!kInwards && !pieces.writable()) throw nb::value_error("pieces: an array is read-only");
    const std::vector<uint8_t*> at = places(slots, pieces.block_bytes(), kInwards);
    NewBytes digests(checksum ? kDigestBytes * at.size() : 0);
    {
        const Unlocked unlocked;
        copy_blocks(at.size(), pieces.block_bytes(), most, nice,
                    checksum ? digests.data() : nullptr, [&](size_t i, const auto& sink) {
                        uint8_t* slot = at[i];
                        const uint32_t after = ids[i + 1 < ids.size() ? i + 1 : i];
                        pieces.each(ids[i], after,
                                    [&](uint8_t* piece, size_t bytes, uint8_t* next) {
                                        if constexpr (kInwards) {
                                            sink(slot, piece, bytes, next);
                                        } else {
                                            sink(piece, slot, bytes, nullptr);
                                        }
                                        slot += bytes;
                                    });
                    });
    }
    return digests.object;
}

// Two buffers of the same size, held for a copy.
struct Pair {
    Pair(nb::handle dst, nb::handle src)
        : to(dst, Access::kWrite, "dst"), from(src, Access::kRead, "src") {
        if (to.size() != from.size()) {
            fail(nb::value_error, "dst has ", to.size(), " bytes, src ", from.size());
        }
    }
    HeldMemory to, from;
};

nb::bytes copy(nb::handle dst, nb::handle src, bool checksum, long threads) {
    const size_t most = checked_threads(threads);
    const Pair pair(dst, src);
    NewBytes digest(checksum ? kDigestBytes : 0);
    {
        const Unlocked unlocked;
        copy_blocks(1, pair.to.size(), most, 0, checksum ? digest.data() : nullptr,
                    [&](size_t, const auto& sink) {
                        sink(pair.to.data(), pair.from.data(), pair.to.size(), nullptr);
                    });
    }
    return digest.object;
}

// Runs of equal length at equal distances in a buffer.
uint8_t* first_run(const HeldMemory& held, uint64_t count, uint64_t bytes, uint64_t at,
                   uint64_t step, const char* what) {
    const uint64_t size = held.size();
    if (bytes > size || at > size - bytes ||
        (step != 0 && count > 1 && count - 1 > (size - bytes - at) / step)) {
        fail(nb::value_error, what, ": the runs are not in its ", size, " bytes");
    }
    return held.data() + at;
}

void copy_runs(nb::handle dst, nb::handle src, uint64_t count, uint64_t bytes, uint64_t dst_at,
               uint64_t dst_step, uint64_t src_at, uint64_t src_step) {
    const HeldMemory into(dst, Access::kWrite, "dst"), out_of(src, Access::kRead, "src");
    uint8_t* to = first_run(into, count, bytes, dst_at, dst_step, "dst");
    const uint8_t* from = first_run(out_of, count, bytes, src_at, src_step, "src");
    const Unlocked unlocked;
    for (uint64_t i = 0; bytes != 0 && i < count; i++) {
        std::memcpy(to + i * dst_step, from + i * src_step, bytes);
    }
}

nb::bytes digest_of(nb::handle data, uint64_t seed) {
    const HeldMemory held(data, Access::kRead, "data");
    NewBytes digest(kDigestBytes);
    {
        const Unlocked unlocked;
        xxh3_128(held.data(), held.size(), seed, digest.data());
    }
    return digest.object;
}

}  // namespace
}  // namespace kvtier

void bind_blocks(nb::module_& m) {
    using namespace kvtier;
    using namespace nb::literals;
    nb::class_<Buffers>(m, "Buffers", nb::is_final())
        .def(nb::init<nb::handle, size_t, size_t, uint64_t, bool, bool>(), "memory"_a, "first"_a,
             "count"_a, "nbytes"_a, "writable"_a = false, "exact"_a = true)
        .def("__len__", &Buffers::count)
        .def(
            "write",
            [](const Buffers& buffers, size_t number, nb::handle data) {
                const HeldMemory from(data, Access::kRead, "data");
                if (!buffers.writable()) throw nb::value_error("targets: a buffer is read-only");
                if (number >= buffers.count()) {
                    fail(nb::index_error, "buffer ", number, " of ", buffers.count());
                }
                if (from.size() != buffers.bytes()) {
                    fail(nb::value_error, "data: ", from.size(), " bytes, not ", buffers.bytes());
                }
                if (from.size() != 0) std::memcpy(buffers.at(number), from.data(), from.size());
            },
            "number"_a, "data"_a)
        .def_prop_ro("nbytes", &Buffers::bytes);
    m.def(
        "copy_in",
        [](nb::handle mappings, nb::handle slots, const Buffers& sources, long threads,
           bool checksum, nb::handle at) {
            return copy_whole(mappings, slots, sources, at, threads, checksum, true);
        },
        "mappings"_a, "slots"_a, "sources"_a, "threads"_a = 1, "checksum"_a = false,
        "at"_a = nb::none());
    m.def(
        "copy_out",
        [](nb::handle mappings, nb::handle slots, const Buffers& targets, long threads,
           bool checksum) {
            return copy_whole(mappings, slots, targets, nb::none(), threads, checksum, false);
        },
        "mappings"_a, "slots"_a, "targets"_a, "threads"_a = 1, "checksum"_a = false);
    m.def("copy_parts", &copy_parts, "mappings"_a, "slots"_a, "starts"_a, "each"_a, "targets"_a,
          "threads"_a = 1);
    m.def("copy_tokens", &copy_tokens, "mappings"_a, "slots"_a, "starts"_a, "each"_a, "tokens"_a,
          "block_tokens"_a, "first"_a, "targets"_a, "threads"_a = 1);
    nb::class_<EnginePieces>(m, "Pieces", nb::is_final())
        .def(nb::init<nb::sequence, const std::vector<int64_t>&, const std::vector<int64_t>&,
                      const std::vector<int64_t>&>(),
             "arrays"_a, "offsets"_a, "strides"_a, "piece_bytes"_a)
        .def_prop_ro("block_bytes", &EnginePieces::block_bytes)
        .def_prop_ro("blocks", &EnginePieces::blocks)
        .def_prop_ro("writable", &EnginePieces::writable);
    const auto def_copy_pieces = [&m](const char* name, auto copy) {
        m.def(name, copy, "pieces"_a, "block_ids"_a, "mappings"_a, "slots"_a, "threads"_a = 1,
              "checksum"_a = false, "nice"_a = 0);
    };
    def_copy_pieces("gather", &copy_pieces<true>);
    def_copy_pieces("scatter", &copy_pieces<false>);
    m.def("copy_runs", &copy_runs, "dst"_a, "src"_a, "count"_a, "nbytes"_a, "dst_at"_a,
          "dst_step"_a, "src_at"_a, "src_step"_a);
    m.def("copy", &copy, "dst"_a, "src"_a, "checksum"_a = false, "threads"_a = 1);
    m.def(
        "nt_loops",
        [](nb::sequence dsts, nb::sequence srcs) {
            const size_t count = nb::len(dsts);
            if (nb::len(srcs) != count) throw nb::value_error("need as many sources as targets");
            std::deque<Pair> pairs;  // a Pair cannot be moved: it holds buffers
            for (size_t i = 0; i < count; i++) pairs.emplace_back(dsts[i], srcs[i]);
            const Unlocked unlocked;
            for (const Pair& pair : pairs) {
                stream_copy(pair.to.data(), pair.from.data(), pair.to.size());
            }
            stream_fence();
        },
        "dsts"_a, "srcs"_a);
    m.def(
        "memcpy",
        [](nb::handle dst, nb::handle src) {
            const Pair pair(dst, src);
            const Unlocked unlocked;
            if (pair.to.size() != 0) {
                std::memcpy(pair.to.data(), pair.from.data(), pair.to.size());
            }
        },
        "dst"_a, "src"_a);
    m.def("xxh3_128", &digest_of, "data"_a, "seed"_a = 0);
}
